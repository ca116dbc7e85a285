"""Run a planned step, forward and backward, and measure it.

step                 a planned step, its report, and the runs that are open
step_run             one run of a step, from the start of forward to the end of backward
autograd_function    the autograd node whose backward runs the backward half
tensor_roles         the role of each tensor that a step reads or makes
concurrent_runs      runs of one module that are open at the same time
eager_fallback       gradients for outputs for which no backward was planned
cuda_graphs          record both halves as CUDA graphs and replay them
cuda_graph_checks    reasons why a step can't be recorded
measure_update       measure the optimizer's first update after a measured step
out_of_memory        explain an out-of-memory error of torch's allocator
"""

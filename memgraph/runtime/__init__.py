"""Run a planned step, forward and backward, and measure it.

step                 a planned step, its report, and the times of its runs
step_parts           the fixed parts of a step
step_run             one run of a step, from the start of forward to the end of backward
undo                 undo a run whose guard has failed
autograd_function    the autograd node whose backward runs the backward half
concurrent_runs      runs of one module that are open at the same time
released_outputs     plans that rely on the caller to free outputs
eager_fallback       gradients for outputs for which no backward was planned
cuda_graphs          record both halves as CUDA graphs and replay them
cuda_graph_checks    check whether a step can be recorded
arena                run a step in one block of memory, at addresses of the plan
measure_update       measure the optimizer's first update after a measured step
step_history         the times of the latest steps, and when to plan again
out_of_memory        explain an out-of-memory error of torch's allocator
"""

"""Measure ops, links and memory: the prices that a plan is made of.

op_profiler           time, workspace and result layout of each distinct op
roofline              the time of an op that can't be run, from flops and bytes
correct_fakes         correct fake tensors where real kernels return another layout
library_workspaces    workspaces that cuBLAS keeps
link_bandwidth        bandwidth to disk or host, by the size of a copy
copy_overhead         time that compute loses to copies
page_faults           time that fresh pages take
machine_profile       all links of a device, as a passes.Machine
memory_meter          bytes that a piece of work allocates
step_timer            time of each op inside a step
"""

"""Measure ops, links and memory, for the prices of a plan.

op_profiler           time, workspace and result layout of each distinct op
op_cost               the cost of an op, its key, and its record on disk
real_strides          strides of results that torch describes for contiguous tensors only
region_profiler       time and peak of ops that are compiled as one
generated_arguments   arguments on which an op is run alone
divided_arguments     arguments by which an op is priced with all of its work
roofline              time of an op that can't be run, from flops and bytes
correct_fakes         correct fake tensors where real kernels return another layout
library_workspaces    workspaces of cuBLAS
link_bandwidth        bandwidth to disk or host, by copy size
machine_profile       all links of a device, as a passes.Machine
memory_meter          bytes that a function allocates
step_timer            time of each op inside a step
measuring_room        the bytes that measuring may take beside what is on the device
"""

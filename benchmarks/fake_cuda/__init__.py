"""Steps as CUDA would dispatch them, on a machine without a CUDA device.

    make fake-cuda        # or: python -m benchmarks.fake_cuda [--only NAME] [--device h200]

__main__                                a row for each model: captured, priced, planned, rewritten
described_device                        run Python with a CUDA device that is described, and not there
host_kernels                            run a module on such a device, whose ops the host computes
cuda_only_ops                           ops that the host has not, from their definition
host_tensors, host_draws, host_graphs   their memory, random numbers, and CUDA graphs
held_memory                             what torch's allocator holds for steps, in arenas and outside
models                                  what is captured
planned_step                            a step that is captured, priced, planned and rewritten
op_checks                               devices, writes and workspaces of each op
"""

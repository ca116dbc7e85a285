"""Steps as CUDA would dispatch them, on a machine without a CUDA device.

    make fake-cuda        # or: python -m benchmarks.fake_cuda [--only NAME] [--device h200]

__main__            a row for each model: captured, priced, planned, rewritten; what differs from a CPU
described_device    run Python with a CUDA device that is described, and not there
models              what is captured
planned_step        a step that is captured, priced, planned and rewritten
op_checks           devices, writes and workspaces of each op
"""

"""From a placement of each storage to decisions at ops.

candidate          a placement, its plan and its forecast
schedule           placement -> plan
recompute_order    ops to recompute before an op of backward
copy_timing        when copies begin and end
streamed_values    when streamed state is on the device
staying            keep a reloaded value until its next use
"""

"""From a placement of each storage to decisions at ops.

candidate          a placement, its plan and its forecast
schedule           placement -> plan
recompute_order    ops to run again before an op of backward
copy_timing        when copies begin and end
fetches            when offloaded state is on the device
staying            keep a fetched value until its next use
"""

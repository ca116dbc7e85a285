"""From a placement of each storage to decisions at ops.

candidate          a placement, its plan and its forecast
schedule           placement -> plan
copy_timing        when copies begin and end
streamed_values    when streamed state is on the device
tier_choice        choose the tier of each value that a plan offloads
"""

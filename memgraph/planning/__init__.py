"""From a call to a step that is ready to run.

planner         capture, profile, plan, rewrite and partition, in this order
float_keys      the step that fits a call with other floats
capture_cache   captures of dropped steps, for calls that come again
lowering        compile stretches of a planned graph with Inductor
replan          plan once more with the times that the ops took inside the step
"""

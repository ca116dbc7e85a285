"""From a call to a step that is ready to run.

planner      capture, profile, plan, rewrite and partition, in this order
lowering     compile stretches of a planned graph with Inductor
replan       plan once more with the times that the ops took inside the step
"""

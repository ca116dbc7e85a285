"""Say what a planned step takes: the one simulator that has the last word.

forecast    bytes at every op, time on every queue
plan_result   PlanResult: a plan beside the step as captured, and what is proven of both
"""

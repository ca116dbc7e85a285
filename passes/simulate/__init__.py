"""Simulate a planned step: the one forecast that all planners use.

forecast      bytes at every op, time on every queue
plan_result   PlanResult: a plan, the step without it, and what is proven of both
"""

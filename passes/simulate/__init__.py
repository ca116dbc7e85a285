"""Simulate a planned step: the one forecast that all planners use.

forecast      bytes at every op, time on every queue
arena         an address in one block for each storage that a step allocates
caching_allocator   the bytes that torch's allocator holds of a GPU for a step
plan_result   PlanResult: a plan, the step without it, and what is proven of both
bound_proof   a proof of a bound on the time that plans add
spacers       blocks with which torch's allocator gives out the addresses of an arena
"""

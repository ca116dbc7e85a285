"""The text of a step, and what is decided about it.

trace         Op and Trace: a step as straight-line text that prints and parses back
machine       Machine: device, budget, link, network, casts
decisions     Recompute, Offload, Reload, Stream; apply(trace, plan)
ops           names of the ops that a plan adds
liveness      from which op to which op a storage is live
invariants    what holds of every trace
errors        BudgetError
arrays        array types
"""

"""Pipeline stages: where a step is cut, and what each stage runs.

places             the place of each op in the order of forward
interval_costs     time and memory of every interval of places at once
cut                the intervals that make the slowest stage as fast as can be
owned_cut          where stages begin in another call, once each has its parameters
makespan           a lower bound of the time of a mini-batch
action             one thing that a rank runs
pipeline_schedule  the order in which ranks run their micro-batches
timeline           when they do, and how long they wait
rank_bytes         the most bytes of a rank with several stages
preceding          what a stage recomputes before its gradient comes
weights            backward in two, gradients of parameters last
fixed_plans        plans that recompute everything
stage_trace        the trace of one stage, with what it receives and sends
"""

"""Run a model as pipeline stages, one or several on each rank.

pipeline.py: the call `memgraph.pipeline`, and its steps
arguments.py: the arguments of a pipeline, checked
chunks.py: a mini-batch in micro-batches
whole_step.py: the captured step of one micro-batch, priced
step_capture.py: such steps on all ranks, with what the first has measured
stage_cut.py: a step in stages, and what these send to each other
cutter.py: the best cut
first_cut.py: the cut of the first call, which later calls follow
stage_plans.py: the plans of a rank's stage, for each kind of mini-batch
mini_batch_plan.py: the stages of a rank for the micro-batches of one mini-batch
pipeline_report.py: the forecast of a mini-batch, as text
stage_budget.py: what a rank holds besides its stage's step
stage_search.py: the search for the plan of a stage, until a time
stage_planner.py: the plan of a stage within its bytes
rank_planner.py: the plans of the stages of a rank, which run one at a time
rank_stages.py: these plans for each kind of micro-batch, and the smallest ones
planned_stage.py: a stage with its plan, ready to run
stage_runs.py: forward and backward of the micro-batches of a mini-batch
mini_batch.py: the run of one mini-batch
state: what a rank keeps between steps
ranks: the ranks, and what they send to each other
"""

"""From a call to a step that is ready to run.

planner            the table of contents: capture, price, plan, rewrite, assemble
variants           the captures of a module, with what each assumes and its steps
general_captures   captures for any float or length
known_captures     captures that stand in the place of a new one
value_answers      where calls of one kind are captured for many sets of values
target             the device of a module, its budget and its tier
optimizer_state    the changes that an optimizer makes to a step; here for no optimizer
optimizers         the same for an optimizer that is counted, fused or sharded
ranks              the ranks that plan together, or a rank alone
attempts           the graphs of a call that are tried in turn, and the error where no plan fits any
step_graph         the graph of a call's step
capture_step       a call -> the graph of its step
lengths            steps of many lengths from one with symbols
pricing            the graph -> its trace with prices, and the machine
search             trace and machine -> a plan
plan_cache         plans that were found before
accumulated_step   a plan of the step that adds to gradients
later_step         the step of the same call once gradients exist
scalar_outputs     plan for scalar outputs alone where no plan for all fits
lowering           compile parts of a planned graph with Inductor
assembly           the plan -> the parts of the step
replan             plan again with the times that ops took inside the step
call_kinds         warn when calls differ each time
progress           progress lines while a call is planned
"""

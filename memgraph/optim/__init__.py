"""Run an optimizer whose parameters, gradients or states are offloaded, or run its update inside backward.

placement             which parameters, gradients and states are offloaded
state_parts, trained  optimizer states in groups; what a step trains
elementwise           optimizers whose update changes each element on its own
twin                  a copy of an optimizer for other parameters
parameter_values      the values of a trace that belong to one parameter
optimizer_clone       run a copy of an optimizer on other tensors
optimizer_profiler    measure the states and the update of an optimizer on made-up parameters
update_operands       the tensors that an update reads and writes
window_plan           cut an update into windows of few bytes
window_views          views of a parameter and its states inside a window
window_memory         forecast the bytes of an update in windows
windowed_update       update window by window while the disk reads ahead and writes behind
windowed_optimizer    replace an optimizer's step() by the windowed one
offloaded_update      optimizer.step() where anything is offloaded
fused_update          update parameters inside backward
streamed_update       update offloaded parameters inside backward
host_step, stepping   update on the host behind a GPU, and measure it
update_cost           add states and update to the text of a step
tier_slots            slots of the tier that a graph uses
torn                  refuse to go on after half an update
"""

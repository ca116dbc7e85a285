"""Run an optimizer whose parameters, gradients or states are offloaded, or run its update inside backward.

placement             offload parameters, gradients and states, and reload them for good
tier_slots            slots of the tier that a graph uses
trained_parameters    what a step trains, and the states that may be offloaded
elementwise           optimizers whose update changes each element independently
update_unit           how finely a step can be cut: to elements, to parameters, or not at all
first_state           the state that an optimizer's first step creates
validate_state        check a state dict before it is loaded
trial_copy            copy an optimizer with all that it keeps, to try its step
kernel_text           what may decide which kernels a step runs
fake_step             the bytes that a step allocates, on tensors without bytes
optimizer_profiler    measure the states and the update of an optimizer on made-up parameters
update_cost           add states and update to the text of a step
update_operands       the tensors that an update reads and writes
window_plan           split an update into windows of few bytes
window_views          views of a parameter and its states inside a window
window_memory         forecast the bytes of an update in windows
windowed_update       update window by window while the disk reads ahead and writes behind, in step() or in backward
step_on               the user's own step on some of its parameters, or on a window
windowed_optimizer    replace an optimizer's step() by the windowed one
offloaded_update      optimizer.step() where anything is offloaded
fused_update          update parameters inside backward
host_step             update on the host behind a GPU, and measure its speed
parameter_kind        parameters that an optimizer updates alike
"""

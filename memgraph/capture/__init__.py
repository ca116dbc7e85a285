"""Trace a call of a module into one functional graph of forward and backward.

saved                 captures of earlier processes
capture               capture(): the whole way, as below
call                  take a call apart into tensors and constants
fake_tensors          fake tensors, torch's modes and random generators around a trace
constant_fake_mode    fake tensors with known values where no input affects them
values                values that Python asks for
user_checkpoint       torch.utils.checkpoint and fused layers in a trace
trace_joint           first trace: forward and backward, op by op
float_inputs          floats of a call that become inputs of the graph
float_capture         capture with these, compared with a capture in which they are constants
sizes                captures in which lengths are symbols
type_checks           find code that checks the type or identity of a float
inplace               in-place ops on temporaries as functional ops
functionalize         second trace: no in-place ops left
finalize              order outputs, write buffers back, own gradients
graph_writer          insert nodes where forward ends
reinplace             write to buffers in place where eager does
leaf_inputs           inputs that forward may change in place though they require a gradient
prod_gradient         the gradient of torch.prod as in eager
reentrant_forward     whether forward can run a second time
constants             tensors that a step reads besides its inputs
python_state          draws, counters and other Python state that forward changes
explain_errors        turn torch's errors into a CaptureError with source line and advice
"""

"""Trace a call of a module into one functional graph of forward and backward.

capture               capture(): the whole way, as below
call                  take a call apart into tensors and constants
fake_tensors          fake tensors and the modes of torch around a trace
constant_fake_mode    values that are constants of the trace
trace_joint           first trace: forward and backward, op by op
float_inputs          floats of a call that become inputs of the graph
float_capture         capture with these, compared with a capture in which they are constants
type_checks           find code that checks the type or identity of a float
inplace               in-place ops on temporaries as functional ops
functionalize         second trace: no in-place ops left
finalize              order outputs, write buffers back, own gradients
graph_writer          insert nodes where forward ends
constants             tensors that a step reads besides its inputs
chance                random numbers while tracing
fast_paths            fused layers of torch in a trace
user_checkpoint       torch.utils.checkpoint inside the model
restore_module        undo what tracing did to the module
side_effects          refuse Python state that forward changes
explain_errors        turn torch's errors into a CaptureError with source line and advice
"""

"""Trace a call of a module into one functional graph of forward and backward.

capture               capture(): the whole way, as below
tracer                trace a call until its values and opaque submodules are known
trace_call            trace a call once, and make its graph
call                  take a call apart; refuse what a captured step would lose
fake_tensors          fake tensors, torch's modes and random generators around a trace
constant_fake_mode    fake tensors with known values where no input affects them
values                values that Python asks for
user_checkpoint       torch.utils.checkpoint and fused layers in a trace
joint                 first trace: forward and backward, op by op
floats                captures in which floats are inputs
sizes                 captures in which lengths are symbols
inplace               in-place ops on values of the step as functional ops
split_parts           changed parts of a split in one tensor, as in eager
written_views         a write into part of a value as a new value of the whole
functionalize         second trace: no in-place ops left
finalize              order outputs, write buffers back, own gradients
assemble              a `Captured` from the graph and its roles
graph_writer          insert nodes where forward ends
reinplace             write to buffers in place where eager does
reentrant_forward     whether forward can run a second time
constants             tensors that a step reads besides its inputs
python_state          draws, counters and other Python state that forward changes
explain_errors        turn torch's errors into a CaptureError with source line and advice
"""

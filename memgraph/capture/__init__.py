"""Trace a call of a module into one functional graph of forward and backward.

capture               capture(): the whole way, as below
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
functionalize         second trace: no in-place ops left
finalize              order outputs, write buffers back, own gradients
reinplace             write to buffers in place where eager does
reentrant_forward     whether forward can run a second time
constants             tensors that a step reads besides its inputs
python_state          draws, counters and other Python state that forward changes
explain_errors        turn torch's errors into a CaptureError with source line and advice
scripted_functions    call functions that are compiled by TorchScript as Python
"""

"""Values that Python asks for: found by one plain forward, given to the trace, and guarded.

questions       the questions, and their answers
value_run       the plain forward that records the answers
replay          the answers in a trace, with guards
tensor_reads    what Python reads of tensors without an op
recurrent_layers  recurrent layers as one op each
host_lengths    lengths that torch reads on the host, as guards
"""

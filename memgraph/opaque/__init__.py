"""Run parts of a module that can't be traced as they are, each as one op of the graph.

part             a submodule's call as an op: forward, and backward by autograd
eager_state      the modes and the state in which the submodule runs as in eager
observed_ops     the bytes that ops make, and what they write to
reach            facts of an autograd graph: which tensors a gradient reaches, and how often
recorder         a real call of a submodule -> its part, measured
parts_of_trace   put an op in the place of a submodule's call in a trace
"""

"""Run parts of a module that can't be traced as they are, each as one op of the graph.

chosen_parts     the submodules that run as they are, and why
part             a submodule's call as an op: forward, and backward by autograd
inputs           the tensors that a part reads
results          the results of a part, apart from the numbers
run              run a submodule on other tensors than its own
eager_state      the modes and the state in which the submodule runs as in eager
entropy_seeds    seeds from the system's entropy, taken again when forward runs again
observed_ops     the bytes that ops make, and what they write to
live_bytes       the bytes that are alive at once, with what autograd would keep
module_calls     take the calls of submodules
recorder         a real call of a submodule -> its part, measured
traced_parts     put an op in the place of a submodule's call in a trace
refused_dropout  refuse a layer whose dropout cuDNN draws from a state that can't be read
"""

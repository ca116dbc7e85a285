"""The fx graph of a step: read it, change it, partition it into forward and backward.

captured            Captured: the joint graph and the roles of its inputs and outputs
nodes               facts about a node: views, storages, mutation, randomness
tensor_numbers      stand-ins for numbers that forward reads from tensors, while it is traced
number_ops          numbers that a graph reads from its tensors, and guards on comparisons of them
float_arguments     floats of a call among the arguments of nodes
provenance          phase and source line of each node
result_layout       layout of an op's results
aten_shims          ops that aten lacks
draws/              draws with `random` and numpy
recurrent/          recurrent layers as ops, packed rows
guard_ops           guards on values of tensors, as ops
opaque_ops          submodules that run as they are, as ops
define_op           define an op that is the same on every device
op_descriptions     results of ops that torch describes wrongly or not at all
ops                 runtime ops: offload, reload, wait, free, update, collectives
accumulate_grads    add gradients to .grad inside backward
fuse_updates        insert parameter updates into backward
summarize           fx graph -> passes.Trace
rewrite             fx graph and planned trace -> rewritten fx graph
halves              joint graph -> forward and backward GraphModule
gradient_sums       sums of gradients: those of one parameter, early ones, sums in place
inductor            compile segments of a graph
"""

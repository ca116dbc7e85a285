"""The fx graph of a step: read it, change it, cut it into two halves.

captured            Captured: the joint graph and the roles of its inputs and outputs
nodes               facts about a node: views, storages, mutation, randomness
float_arguments     floats of a call among the arguments of nodes
provenance          phase and source line of each node
result_layout       how the results of an op are laid out
aten_shims          ops that aten lacks
ops                 runtime ops: offload, reload, wait, free, update, collectives
accumulate_grads    add gradients to .grad inside backward
fuse_updates        insert parameter updates into backward
sums                where gradients are summed over micro-batches
summarize           fx graph -> passes.Trace
rewrite             fx graph and planned trace -> rewritten fx graph
partition           joint graph -> forward and backward GraphModule
unused              a backward half without the gradients of unused outputs
inductor            compile a stretch of a graph
"""

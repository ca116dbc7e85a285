"""The fx graph of a step: read it, change it, partition it into forward and backward.

captured            Captured: the joint graph and the roles of its inputs and outputs
nodes               facts about a node: views, storages, mutation, randomness
float_arguments     floats of a call among the arguments of nodes
provenance          phase and source line of each node
result_layout       layout of an op's results
aten_shims          ops that aten lacks
host_draws          draws with `random` and numpy as ops
first_draws         coins before all other ops
counters            numbers with which forward counts
ops                 runtime ops: offload, reload, wait, free, update, collectives
accumulate_grads    add gradients to .grad, and over micro-batches, inside backward
fuse_updates        insert parameter updates into backward
summarize           fx graph -> passes.Trace
rewrite             fx graph and planned trace -> rewritten fx graph
partition           joint graph -> forward and backward GraphModule
inductor            compile segments of a graph
"""

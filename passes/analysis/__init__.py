"""Facts about a trace that several planners use.

step_graph      the step as a networkx graph
reuse_gaps      storages that forward makes and backward reads, and the gap between
chain_sections    narrow places that cut forward into a chain
host_update     offloaded states that the host updates
"""

"""Put ops in another order where that is allowed.

comm_order          collectives of gradients as early as possible
early_updates       updates as soon as nothing reads the parameter
microbatch_order    micro-batches section by section
"""

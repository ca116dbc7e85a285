"""Tiers for offloaded bytes, and the copies to and from them.

tiers              the interface of a tier, the tiers of a device, several as one
places             the location of the tensors of each owner
file_tier          activations in files, behind a CPU
file_space         its files: in a folder or in host memory, bounded in total
spill_file         unnamed files in a folder
io_threads         threads that read and write
async_copy         copies in chunks, while the caller continues
pinned_tier        activations in pinned host memory, behind a GPU
pinned_pool        blocks of pinned memory, bounded in total
mapped_storage     parameters and states in files that stay ordinary tensors
weight_file        a file of weights that the caller has mapped, as the place of frozen parameters
pinned_storage     the same in pinned memory
transfer           copies of mapped tensors
wire_cast          cast to bfloat16 for a copy
"""

"""Tiers for offloaded bytes, and the copies to and from them.

tiers              the interface of a tier, and the tier of a device
disk_tier          activations on disk, behind a CPU
spill_file         unnamed files for it
io_threads         threads that read and write
async_copy         copies in chunks, while the caller continues
pinned_tier        activations in pinned host memory, behind a GPU
pinned_pool        blocks of pinned memory, bounded in total
populate_pages     give memory its pages at once, before it is pinned
mapped_storage     parameters and states on disk that stay ordinary tensors
pinned_storage     the same in pinned memory
transfer           copies of mapped tensors
wire_cast          cast to bfloat16 for a copy
"""

"""Send buckets between ranks, and find out which rank is late or gone.

rank_group       small collectives: the maximum, all values, texts and failures of all ranks
exchange         choose the transport of a bucket: collectives, messages, or shared memory
collectives      reduce-scatter and all-gather
shared_memory    ranks of one host read each other's memory
agreement        check that all ranks were given the same parameters and options
consensus        check that all ranks are about to run the same step
watchdog         notice that a collective failed or is late, and raise an error that names the rank
model_parallel   ranks that hold other parts of the same parameters
"""

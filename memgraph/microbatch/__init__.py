"""Run a batch in micro-batches, and prove first that its rows are independent.

microbatches                split the batch, join the results, count targets of mean losses
check_independence          check that a row of the output depends only on that row of the input
deterministic_interpreter   run a graph without random numbers
"""

"""Run a batch in parts, and prove first that its rows are independent.

microbatches                a module that takes its batch in parts and joins the results
check_independence          check that a row of the output depends on that row of the input alone
deterministic_interpreter   run a graph without random numbers
targets                     how many targets a mean loss counts
advice                      try whether micro-batches would make a plan fit
"""

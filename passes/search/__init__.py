"""Find a plan that fits: the greedy pass, and the search around the linear program.

greedy             lower the peak, cheapest byte first
optimize           passes near the optimum, with a bound how near
rounding_search    round, simulate, repair
state_search       the same for a plan alone, where ops read offloaded state
knapsack           what to keep within so many bytes, for torch.compile
local_search       change one placement at a time
incumbent          the best plan so far, and what is proven
work               limits of a search
"""

"""Find a plan that fits: the greedy pass, and the search around the linear program.

greedy             lower the peak, cheapest byte first
optimize           passes near the optimum, with a bound how near
rounding_search    round, simulate, repair
knapsack           what to keep within so many bytes, for torch.compile
work               limits of a search
"""

"""Find a plan that fits: greedy, then relax, round, simulate and repair.

greedy          lower the peak, cheapest byte first
optimize        near the optimum, with a proof how near
local_search    change one placement at a time
work            limits of a search
"""

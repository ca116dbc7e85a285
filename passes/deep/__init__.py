"""Plans for budgets far below the step's peak, where ops run more than once.

chain, chain_dp    dynamic programming over a chain of sections
"""

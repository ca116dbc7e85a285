"""Plans for budgets far below the step's peak, where ops run more than once.

phase_lp, phase_search    cut backward into phases and plan each
rerun_state, anneal       annealing over single recomputations
chain, chain_dp           dynamic programming over a chain of sections
"""

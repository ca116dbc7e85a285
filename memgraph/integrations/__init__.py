"""Parts for other libraries.

trainer             MemoryBudget, a callback of transformers' Trainer
lightning_budget    LightningBudget, a callback of Lightning's
budgeted_forward    what both do to a module
activation_solver   ActivationSolver, for what torch.compile saves for backward
"""

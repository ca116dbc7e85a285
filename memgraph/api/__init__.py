"""The public functions: compile a module, plan it without a step, sweep budgets, save and load a training.

compiler             compile() and plan(): read the options, return a module or a report
compiled_module      CompiledModule: look up the step of a call by its signature, or have it planned, then run it
budget_sweep         sweep(): the time of a step for every budget
training_state       save_state() and load_state(): model, optimizer and random numbers in one file
safetensors_file     the same state as a safetensors file
transforms           refuse torch.func and forward-mode differentiation
"""

"""The public functions: compile a module, plan it without a step, sweep budgets, save and load a training.

compiler             compile() and plan(): read the options, return a module or a report
compiled_module      CompiledModule: run the step of a call
kept_steps           the steps of a module's calls, found by signature or planned
budget_sweep         sweep(): the time of a step for every budget
shapes_only          tensors without bytes as arguments of plan() and sweep()
training_state       save_state() and load_state(): model, optimizer and random numbers in one file
training_folder      save_sharded() and load_sharded(): the same in a folder, by one process or by many
safetensors_file     the same state as a safetensors file
loaded_state         copy loaded tensors out of a mapped file
atomic_file          replace a file completely or not at all
checksums            find damage in a saved file
"""

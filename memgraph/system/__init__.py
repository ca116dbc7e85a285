"""The machine and the process.

device               memory of a device; make a process return freed memory
byte_sizes           "8GB" -> bytes
garbage              pause Python's garbage collector, or leave older objects out of it
measurement_cache    measurements on disk, for later processes
trial_room           the bytes left for ops that run during a capture
disturbance          the share of a measurement that is other work of the machine
setting              the environment that a measurement depends on
timer                time a function
locks                planning and capture by one thread at a time
planning_process     all that planning does to the process, and its end
python_random        states of the generators of `random` and numpy
own_generators       generators of `random` and numpy that a module has for itself
signals              delay Ctrl-C until the state is consistent
own_attributes       attributes that Python gives to objects and files
entered_code         see which code is entered in a block
frames               the line of the user's code behind an exception
fake_log             errors of ops on fake tensors, left out of torch's log
user_warning         warn at the user's own line
private_names        private names of torch, checked at import
profiler_thread      run work outside the caller's profiler
graph_sources        drop the sources of compiled graphs
page_pool            one pool of pages for the large tensors of a CPU
pass_log             the log, as variables of the environment ask for it
reference_op         the speed of the machine now, beside that when ops were priced
"""

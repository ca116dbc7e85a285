"""The machine and the process.

device               memory of a device; make a process return freed memory
byte_sizes           "8GB" -> bytes
measurement_cache    measurements on disk, for later processes
setting              the environment that a measurement depends on
timer                time a piece of work
locks                what one thread may do at a time
signals              hold Ctrl-C back until nothing is half done
frames               whose code an exception comes from
user_warning         warn at the user's own line
"""

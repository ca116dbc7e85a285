"""The options of compile(), plan() and sweep().

argument_rules     what each argument accepts, as a table
compile_options    the options of one call, checked
"""

"""The two modules of a step: forward and backward.

partition       joint graph -> forward and backward GraphModule
direct_calls    their code calls ops by what runs them
edited_code     the code of a half with other calls around its ops
"""

"""Decide when a captured graph may be reused.

signature             the facts of a call
assumptions           the facts that a captured graph rests on, and numbers and lengths that may be any
fact_texts            facts in words
cleared_caches        how often caches of functions were emptied
owned_tensors         parameters and buffers of a module, listed quickly
attribute_guard       attributes and variables that forward may read, as groups of tokens
module_attributes     a walk over the attributes of a module
checks                things that were read, and whether they are the same
attribute_snapshot    attributes at one moment: compare, restore, find leaks
attribute_writes      what a forward writes to attributes
written_attributes    which of these no call reads, and which tensors are arguments
what_ran              the functions that ran, and the variables outside of attributes that they refer to
code_reads            the names in one code object
found_functions       the function that code belongs to
packages              whose code a class or a file is
outer_snapshot        their values before they run, and later
variable_guard        a walk over these, at one moment and later
variable_scope        one place that holds variables, and the lines that name one
containers            compare a container with a copy, and restore it
refused_collectives   collectives of the user's own in forward are refused
wrappers              those that train a module over ranks: refused inside, counted around it
module_proxy          a module that shares everything with another but its forward
contents              the content of a value as facts, and its key
read_objects          attributes of torch's objects that are read in a trace
"""

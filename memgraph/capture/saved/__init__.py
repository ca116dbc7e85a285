"""Captures of earlier processes, found by what a call does on fake tensors.

op_log            a digest of all ops of a call, with their arguments and results
rehearsal         run a call for its digest alone: no graph is built
graph_record      a captured graph as JSON, and back
capture_files     the file of captures: what is kept, found, and refused
"""

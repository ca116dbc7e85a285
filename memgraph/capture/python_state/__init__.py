"""Python state that forward changes: as ops and formulas, or refused.

draw_in_graph      draws with `random` and numpy as ops of the graph
refused_draws      refuse other draws with these
refuse_reseeding   refuse what forward does to random generators
refuse_iterators   refuse what is read of iterators and files
refuse_effects     refuse what forward does to the process, to flags and hooks of tensors, and by optimizers
watched_python     what one trace does to Python's state
side_effects       refuse other state that forward changes
eager_types        let code find the types that tensors have in eager mode
function_caches    empty caches of functions that hold a tensor of a trace
"""

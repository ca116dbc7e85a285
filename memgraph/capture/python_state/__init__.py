"""Python state that forward changes: as ops and formulas, or refused.

draw_in_graph      draws with `random` and numpy as ops of the graph
drawn_values       numbers and arrays that stand for what was drawn
refused_draws      refuse other draws with these
refuse_reseeding   refuse what forward does to random generators
refuse_iterators   refuse what is read of iterators and files
counted_numbers    numbers with which forward only counts
watched_python     what one trace does to Python's state
side_effects       refuse other state that forward changes
"""

"""The linear program of a step with many equal layers, as that of a few.

layers     find equal layers
problem    the folded problem
rows       rows between layers
search     plans from it
"""

"""Decide when a captured graph may be used again.

signature             the guard key of a call
module_attributes     attributes that forward may read
attribute_snapshot    their values at one moment
module_proxy          a module that shares everything of another but its forward
"""

"""The sharded optimizer: each rank updates, and holds the state of, its share of the elements."""

from .optimizer import OSS

__all__ = ["OSS"]

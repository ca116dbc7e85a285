"""The sharded optimizer: each rank updates, and holds the state of, its share of the elements."""

from .folder import load_sharded, save_sharded
from .optimizer import OSS
from .scaling import GradScaler

__all__ = ["OSS", "GradScaler", "load_sharded", "save_sharded"]

"""What memgraph raises."""

from __future__ import annotations


class MemgraphError(RuntimeError):
    """What all of memgraph's own errors are."""


class CaptureError(MemgraphError):
    """A module whose step can't be written down as one graph; says where, and what to change."""

"""When the time of later steps differs from their forecast."""

from __future__ import annotations

LENGTH = 20  # steps of which the median is taken


OFF = 0.1  # of a time: what makes another one differ from it


def is_off(us: float, expected_us: float) -> bool:
    """Whether a time differs from another by more than OFF of that."""
    return abs(us - expected_us) > OFF * expected_us

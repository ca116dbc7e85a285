"""Compare the time of later steps with their forecast."""

from __future__ import annotations

LENGTH = 20  # steps in a median
FEW = 3  # steps after which there is one
OFF = 0.1  # least difference that counts, as a share of the expected time


def is_slower(share: float) -> bool:
    """Return True if the machine's speed is worth a word."""
    return abs(share) > OFF / 2


def is_off(us: float, expected_us: float) -> bool:
    """Return True if a time differs from the expected one by more than OFF."""
    return abs(us - expected_us) > OFF * expected_us

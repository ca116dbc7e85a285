"""Find the smallest budget of a call, as the BudgetError of a smaller one gives it.

smallest_of(lambda: memgraph.plan(module, x, budget=1))  ->  1703175
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import memgraph


def smallest_of(call: Callable[[], Any]) -> int:
    with pytest.raises(memgraph.BudgetError) as caught:
        call()
    return caught.value.smallest

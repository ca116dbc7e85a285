"""Find the smallest budget of a call, as the BudgetError of a smaller one gives it.

smallest_of(lambda: memgraph.plan(module, x, budget=1))  ->  1703175
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

import memgraph
from memgraph.planning.attempts import refusal


def smallest_of(call: Callable[[], Any]) -> int:
    """Return the smallest budget; advice on micro-batches is disabled, because it captures the call several times."""
    with (
        mock.patch.object(refusal, "suggest_microbatches", lambda error, *_: error),
        pytest.raises(memgraph.BudgetError) as caught,
    ):
        call()
    return caught.value.smallest

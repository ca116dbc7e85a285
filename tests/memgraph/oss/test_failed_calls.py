"""A call that fails on one rank before it is planned: the others are told, and the next call is right.

All of it is tried in one start of two ranks: what is returned is what each of them said.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import optim

import memgraph
from tests.memgraph.oss.compiled.test_compiled import BYTES, ROOM, Net, batches, same
from tests.support.distributed_loops import train
from tests.support.ranks import on_ranks

HERE = {"failing": False}
SMALL = 3000  # elements: an update is first tried on fewer


class Fussy(optim.AdamW):
    """Can't be tried on large parameters, on the rank that is in a bad mood."""

    pointwise = True

    def step(self, closure: Any = None) -> Any:
        if HERE["failing"] and any(p.numel() > SMALL for group in self.param_groups for p in group["params"]):
            raise FloatingPointError("no, thanks")
        return super().step(closure)


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _failing(rank: int, gather: str) -> tuple[list[str], bool]:
    plain, net = Net(), Net()
    theirs = Fussy(plain.parameters(), lr=0.01)
    optimizer = memgraph.OSS(net.parameters(), Fussy, bucket_bytes=BYTES, gather=gather, lr=0.01)
    model: Any = memgraph.compile(net, ROOM, optimizer=optimizer, time_limit=0.0)
    batch, messages = batches(rank, True), list[str]()
    tokens = batches(rank, True)()

    def step(inputs: Any) -> None:
        model(inputs).backward()

    HERE["failing"] = rank == 1
    messages.append(_said(lambda: step(tokens)))  # an update that can't be tried
    HERE["failing"] = False
    messages.append(_said(lambda: step(tokens if rank == 0 else tokens.float())))  # a call that can't be captured
    train(plain, theirs, batches(rank, True), 2)
    train(model, optimizer, batch, 1)
    messages.append(_said(lambda: step(tokens if rank == 0 else tokens.float())))  # beside a step that is known
    optimizer.zero_grad()
    train(model, optimizer, batch, 1)
    net.double()
    messages.append(_said(optimizer.gather))
    net.float()
    optimizer.gather()
    return messages, same(net, plain)


@pytest.mark.long
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_a_call_that_fails_before_it_is_planned_is_an_error_on_all_ranks(gather: str) -> None:
    (texts, first), (own, second) = on_ranks(2, _failing, gather)
    assert own[0].startswith("UntriedUpdateError: Fussy can't be planned")
    assert texts[0].startswith("AgreementError: the ranks disagree on the planning of the step: without error on rank")
    assert "UpdateError: Fussy can't be planned" in texts[0] and "on rank 1" in texts[0]
    assert (
        own[1].startswith("RuntimeError: Expected tensor") and "ranks [1] can't run this step, and say why" in texts[1]
    )
    if gather == "step":
        assert (
            own[2].startswith("RuntimeError: Expected tensor")
            and "ranks [1] can't run this step, and say why" in texts[2]
        )
    else:  # what is awaited comes first, and is where ranks meet
        assert "or a new kind of call, which begins with one; ranks [0] run something else" in own[2]
        assert "rank 0 is about to run a step that is planned; ranks [1] run something else" in texts[2]
    turned = "float64.* now; create a new optimizer; change it back and call optimizer.gather"
    assert all(bool(re.search(turned, messages[3])) == (gather == "forward") for messages in (own, texts))
    assert first and second

"""The stream that calls backward waits for the gradients of a step that ran on another stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.runtime import autograd_function
from memgraph.runtime.autograd_function import wait_at_end

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Streams:
    """Stands for torch.cuda; notes what each stream is asked to do, in order."""

    def __init__(self) -> None:
        self.current = "caller's"
        self.asked: list[tuple[str, str]] = []

    def current_stream(self, device: torch.device) -> Any:
        return Stream(self, self.current)

    def Event(self) -> Any:
        return Event(self)


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_event(self, event: Event) -> None:
        self.streams.asked.append((self.name, f"waits for {event.of}"))


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.of = streams, "nothing"

    def record(self, stream: Stream) -> None:
        self.of = stream.name
        self.streams.asked.append((stream.name, "is marked"))


class OnSideStream(torch.autograd.Function):
    """An op whose backward runs on a stream of its own, as that of an op does whose forward ran there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, streams: Streams, device: torch.device) -> Tensor:
        ctx.streams, ctx.device = streams, device
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.streams.current = "side"
        ctx.streams.asked.append(("side", "writes gradients"))
        wait_at_end(ctx.device, ctx.streams)
        ctx.streams.current = "caller's"
        return gradients[0], None, None


@pytest.mark.parametrize("device", [GPU, CPU])
def test_the_callers_stream_waits_behind_what_backward_has_written(device: torch.device) -> None:
    streams = Streams()
    OnSideStream.apply(torch.ones(3, requires_grad=True), streams, device).sum().backward()  # type: ignore[no-untyped-call]
    wanted = [("side", "is marked"), ("caller's", "waits for side")] if device == GPU else []
    assert streams.asked == [("side", "writes gradients"), *wanted]


def test_each_backward_of_a_step_ends_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ended = nn.Linear(3, 3), list[tuple[torch.device, bool]]()
    monkeypatch.setattr(
        autograd_function, "wait_at_end", lambda device: ended.append((device, model.weight.grad is not None))
    )
    compiled = memgraph.compile(model, "1GB")
    for count in (1, 2):
        compiled(torch.ones(2, 3)).sum().backward()
        assert ended == [(CPU, True)] * count

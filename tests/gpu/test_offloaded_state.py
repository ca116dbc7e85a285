"""State that lives in pinned memory behind a GPU: the owner's tensors are the GPU's, and training is eager's to the bit.
What the host updates is what its own kernel makes of the same gradients, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memgraph
from memgraph.optim import offloaded_update
from memgraph.storage.mapped_storage import MappedBuffer, TensorSpec, is_offloaded
from memgraph.storage.pinned_storage import PinnedBufferAllocator
from passes import Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")]
GPU = torch.device("cuda", 0)
WIDTH = 1024


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU()))).to(GPU)


def loss(y: Tensor) -> Tensor:
    return y.square().mean()


def test_a_tensor_of_the_gpu_is_stored_on_the_host() -> None:
    before = torch.cuda.memory_allocated()
    home = MappedBuffer([TensorSpec((300, 50), (50, 1), torch.bfloat16)], PinnedBufferAllocator(GPU))
    tensor = home.tensor(0)
    assert tensor.device == GPU and is_offloaded(tensor)
    assert torch.cuda.memory_allocated() == before
    tensor.copy_(torch.arange(15000, device=GPU).view(300, 50))
    torch.cuda.synchronize()
    assert torch.equal(home.slice(0).view_like(tensor).float(), tensor.float().cpu())


def test_the_host_updates_as_its_kernel_does_and_the_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and gradients may be on the host or on the device, and the optimizer may have numbers on the device."""
    monkeypatch.setattr(offloaded_update, "host_update_rate", lambda *_: 1e6)
    for fused in (None, True):
        model = net()
        ours = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        options: dict[str, Any] = {"optimizer": ours, "loss": loss, "lower": None, "host_update": True}
        with pytest.raises(memgraph.BudgetError) as error:
            memgraph.plan(model, torch.randn(64, WIDTH, device=GPU), budget=1, **options)
        step = memgraph.compile(model, int(error.value.smallest * 1.4), **options)
        mirror = [nn.Parameter(parameter.detach().cpu()) for parameter in model.parameters()]
        theirs = torch.optim.AdamW(mirror, lr=1e-2, fused=True)
        hosted = {*model.parameters()}  # in each step so far: a later plan may choose others
        for seed in range(4):
            step(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed)).to(GPU)).backward()
            for parameter, twin in zip(model.parameters(), mirror, strict=True):
                assert parameter.grad is not None
                twin.grad = parameter.grad.cpu()
            ours.step()
            theirs.step()
            ours.zero_grad()
            hosted &= step._planner.state.update.host_owners
            assert hosted
            for parameter, twin in zip(model.parameters(), mirror, strict=True):
                if parameter in hosted:
                    assert torch.equal(parameter.cpu(), twin)
                    assert ours.state[parameter]["step"].device.type == ("cuda" if fused else "cpu")
        report = step.plan
        assert any(isinstance(decision, Stream) and decision.on for decision in report.plan)
        assert report.measured is not None
        assert report.measured <= report.peak <= report.budget


def test_training_equals_eager_and_keeps_to_the_budget() -> None:
    plain, model = net(), net()
    theirs, ours = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    with pytest.raises(memgraph.BudgetError) as error:
        memgraph.plan(model, torch.randn(64, WIDTH, device=GPU), budget=1, optimizer=ours, loss=loss, lower=None)
    budget = int(error.value.smallest * 1.1)
    assert budget < 3 * sum(parameter.nbytes for parameter in plain.parameters())
    step = memgraph.compile(model, budget, optimizer=ours, loss=loss, lower=None)
    for seed in range(5):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed)).to(GPU)
        expected, found = loss(plain(x)), step(x)
        for made, optimizer in ((expected, theirs), (found, ours)):
            made.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(found, expected)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    report = step.plan
    assert any(isinstance(decision, Stream) for decision in report.plan)
    assert report.measured is not None
    assert report.measured <= report.peak <= budget

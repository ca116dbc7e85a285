"""State dicts are the plain optimizer's, and go on from any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memgraph
from memgraph import AgreementError, StateError
from memgraph.profile.memory_meter import measure_peak
from tests.memgraph.oss.test_steps import KINDS, groups, net, train
from tests.support.ranks import on_ranks

State = dict[str, Any]


def trained(kind: type[optim.Optimizer], options: State, steps: int, **given: Any) -> tuple[nn.Module, memgraph.OSS]:
    module = net()
    optimizer = memgraph.OSS(groups(module), kind, gradients="same", **given, **options)
    train(module, optimizer, steps)
    return module, optimizer


def plain(kind: type[optim.Optimizer], options: State, steps: int) -> tuple[nn.Module, optim.Optimizer]:
    module = net()
    optimizer = kind(groups(module), **options)
    train(module, optimizer, steps)
    return module, optimizer


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, in the same order and of the same types."""
    if isinstance(one, Tensor):
        alike = isinstance(other, Tensor) and (one.dtype, one.stride()) == (other.dtype, other.stride())
        return alike and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def on(module: nn.Module, optimizer: optim.Optimizer, steps: int) -> list[Tensor]:
    return train(module, optimizer, steps)


def _whole(rank: int, path: Path) -> list[str]:
    wrong, saved, models = [], {}, {}
    for name, (kind, options) in KINDS.items():
        module, ours = trained(kind, options, 3)
        _, theirs = plain(kind, options, 3)
        for to in (0, 1):
            ours.consolidate_state_dict(to)
            wrong += [f"{name} to {to}"] if rank == to and not same(theirs.state_dict(), ours.state_dict()) else []
        wrong += [] if same(theirs.state_dict(), ours.state_dict(all_ranks=True)) else [f"{name} to all"]
        saved[name], models[name] = ours.state_dict(), module.state_dict()
    if rank == 0:
        torch.save((saved, models), path)
    return wrong


def _crossed(rank: int, path: Path) -> list[str]:
    wrong = []
    saved, models = torch.load(path)
    for name, (kind, options) in KINDS.items():
        wanted_module, wanted = plain(kind, options, 3)
        module = net()
        module.load_state_dict(models[name])
        ours = memgraph.OSS(groups(module), kind, gradients="same", **{**options, "lr": 1e6})
        given = copy.deepcopy(saved[name])
        ours.load_state_dict(given)
        wrong += [] if same(ours.state_dict(all_ranks=True), saved[name]) else [f"{name} is another one now"]
        found, expected = train(module, ours, 2), train(wanted_module, wanted, 2)
        wrong += [] if all(map(torch.equal, found, expected)) else [f"{name} went on otherwise"]
        wrong += [] if same(given, saved[name]) else [f"{name} of the caller has changed"]
    return wrong


@pytest.mark.long
def test_a_consolidated_state_dict_is_the_plain_optimizers_and_goes_on_on_any_number_of_ranks(tmp_path: Path) -> None:
    assert on_ranks(2, _whole, tmp_path / "saved.pt") == [[], []]
    for ranks in (1, 3, 4):
        assert on_ranks(ranks, _crossed, tmp_path / "saved.pt") == [[]] * ranks


def test_the_plain_optimizer_goes_on_from_it(tmp_path: Path) -> None:
    on_ranks(2, _whole, tmp_path / "saved.pt")
    saved, models = torch.load(tmp_path / "saved.pt")
    for name, (kind, options) in KINDS.items():
        wanted_module, wanted = plain(kind, options, 3)
        module = net()
        module.load_state_dict(models[name])
        optimizer = kind(groups(module), **options)
        optimizer.load_state_dict(saved[name])
        assert all(map(torch.equal, train(module, optimizer, 2), train(wanted_module, wanted, 2))), name


def refusal(kind: type[Exception], call: Any, *given: Any) -> str:
    """Return the message of a refused call."""
    with pytest.raises(kind) as caught:
        call(*given)
    return str(caught.value)


def _only_after_consolidation(rank: int) -> list[str]:
    module, ours = trained(optim.Adam, {}, 2)
    messages = [refusal(StateError, ours.state_dict)]
    ours.consolidate_state_dict(to=1)
    before = copy.deepcopy(ours.state_dict()) if rank == 1 else None
    messages += [refusal(StateError, ours.state_dict)] if rank == 0 else ["whole"]
    ours.param_groups[0]["lr"] = 0.5
    if rank == 1:
        kept = ours.state_dict()
        assert kept["param_groups"][0]["lr"] == 0.5  # options are those of now
        on(module, ours, 1)
        assert before is not None and same(kept["state"], before["state"])  # the tensors are copies
    else:
        on(module, ours, 1)
    messages.append(refusal(StateError, ours.state_dict))
    messages.append(refusal(StateError, ours.consolidate_state_dict, 7))
    ours.sharded_step.is_half_updated = rank == 1
    messages.append(refusal(StateError, ours.consolidate_state_dict))
    return messages


def test_a_rank_without_a_whole_state_says_so() -> None:
    first, second = on_ranks(2, _only_after_consolidation)
    text = "rank 0 of the group has its own part of the state, and no consolidated one since it changed; call optimizer.consolidate_state_dict(to=0) on all ranks, or state_dict(all_ranks=True)"
    assert first[:3] == [text] * 3
    assert second[:3] == [text.replace("rank 0", "rank 1").replace("to=0", "to=1"), "whole", second[2]]
    assert first[3] == "to=7, and the group has 2 ranks; give one of them, or None for all"
    assert first[4] == second[4]
    assert first[4].startswith("rank 1 has no state to save: a step has failed when some parameters were updated")


def _new(rank: int) -> list[bool]:
    module, ours = trained(optim.Adam, {}, 0)
    _, theirs = plain(optim.Adam, {}, 0)
    found = [same(ours.state_dict(), theirs.state_dict())]
    ours.load_state_dict(ours.state_dict())
    group = {"params": [nn.Parameter(torch.ones(3))], "lr": 0.5}
    ours.add_param_group(dict(group))
    theirs.add_param_group(dict(group))
    found.append(same(ours.state_dict(), theirs.state_dict()))
    on(module, ours, 1)
    return [*found, "consolidate_state_dict" in refusal(StateError, ours.state_dict)]


def test_a_new_optimizer_has_an_empty_state_which_it_loads() -> None:
    assert on_ranks(2, _new) == [[True] * 3] * 2


class Odd(optim.SGD):
    """Its state has something in it that JSON can not express."""

    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["seen"] = {1}


def _unsendable(rank: int) -> str:
    parameter = nn.Parameter(torch.ones(3))
    ours = memgraph.OSS([parameter], Odd, lr=0.1)
    parameter.grad = torch.ones(3)
    if rank == 0:
        ours.inner.step()
    return refusal(StateError, ours.sharded_state_dict)


def test_a_state_that_cannot_be_sent_is_refused_on_all_ranks() -> None:
    first, second = on_ranks(2, _unsendable)
    assert first == second
    assert first.startswith(
        "rank 0 has no state to save: the state of parameter 0 has a set in it, which can't be sent"
    )


def _damaged(state: State) -> dict[str, Any]:
    """State dicts with which something is wrong."""
    found = {
        name: copy.deepcopy(state)
        for name in ("groups", "length", "twice", "order", "dtype", "strange", "kind", "state")
    }
    del found["groups"]["param_groups"][1]
    found["length"]["param_groups"][0]["params"].pop()
    found["twice"]["param_groups"][0]["params"][1] = found["twice"]["param_groups"][0]["params"][0]
    found["order"]["param_groups"].reverse()
    found["dtype"]["state"][1]["exp_avg"] = found["dtype"]["state"][1]["exp_avg"].double()
    found["strange"]["state"][77] = found["strange"]["state"][0]
    for group in found["kind"]["param_groups"]:
        del group["betas"]
    found["state"]["state"][2]["exp_avg"] = torch.zeros(3)
    return {**found, "nothing": {}, "list": [1], "numbers": {"state": {}, "param_groups": [1, 2]}}


def _refused(rank: int) -> dict[str, str]:
    _, ours = trained(optim.Adam, {}, 2)
    before = copy.deepcopy(ours.state_dict(all_ranks=True))
    given = _damaged(before)
    messages = {name: refusal(StateError, ours.load_state_dict, each) for name, each in given.items()}
    messages["one rank"] = refusal(AgreementError, ours.load_state_dict, before if rank == 0 else given["order"])
    other = copy.deepcopy(before)
    other["param_groups"][0]["lr"] = 7.0 + rank
    messages["options"] = refusal(AgreementError, ours.load_state_dict, other)
    assert same(before, ours.state_dict(all_ranks=True))
    return messages


def test_what_is_no_state_dict_of_it_is_refused_on_all_ranks_and_changes_nothing() -> None:
    first, second = on_ranks(2, _refused)
    assert first == second
    texts = {
        name: text.removeprefix("the state dict is not this optimizer's: ").removesuffix("; nothing was changed")
        for name, text in first.items()
    }
    assert texts["groups"] == "it has 1 group, and the optimizer has 2"
    assert texts["length"] == "it has 2 parameters in group 0, and the optimizer has 3"
    assert texts["twice"] == "it has a parameter twice"
    assert texts["order"] == "'exp_avg' of parameter 0 is float32[7], which does not fit into Adam's float32[7, 11]"
    assert texts["dtype"] == "'exp_avg' of parameter 1 is float64[5, 7], which does not fit into Adam's float32[5, 7]"
    assert texts["strange"] == "it has a state of parameter 77, which is in no group"
    assert texts["kind"] == "its group 0 has no 'betas', so it is of another optimizer than Adam"
    assert texts["state"] == "'exp_avg' of parameter 2 is float32[3], which does not fit into Adam's float32[3, 5]"
    assert (
        texts["nothing"] == texts["list"] == "it is no state dict of an optimizer, which has 'state' and 'param_groups'"
    )
    assert texts["numbers"].startswith("it is not made as one (")
    assert "the ranks disagree on the state dict: fits on rank 0; 'exp_avg' of parameter 0 is" in texts["one rank"]
    assert "the ranks disagree on the options in group 0 of the state dict" in texts["options"]


def _hooked(rank: int) -> list[str]:
    called: list[str] = []
    _, ours = trained(optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1)
    ours.register_state_dict_pre_hook(lambda optimizer: called.append("before saving"))
    ours.register_state_dict_post_hook(lambda optimizer, state: called.append("after saving"))
    ours.register_load_state_dict_pre_hook(lambda optimizer, state: called.append("before loading"))
    ours.register_load_state_dict_post_hook(lambda optimizer: called.append("after loading"))
    ours.load_state_dict(ours.state_dict())
    assert isinstance(ours.param_groups[0]["params"][0], nn.Parameter)
    return called


def test_hooks_of_saving_and_loading_are_called() -> None:
    assert on_ranks(1, _hooked) == [["before saving", "after saving", "before loading", "after loading"]]


def _allocated(rank: int) -> list[int]:
    """Bytes at most while the state goes to rank 0, and comes back from a whole one."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(64, 1024)) for _ in range(8)]
    ours = memgraph.OSS(parameters, optim.Adam, gradients="same")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    ours.step()
    gathered = peak_of(ours.consolidate_state_dict)
    state = ours.state_dict(all_ranks=True)
    return [gathered, peak_of(lambda: ours.load_state_dict(state))]


def peak_of(work: Callable[[], object]) -> int:
    _, seen = measure_peak(work)
    assert seen is not None
    return seen.peak


def test_tensors_are_sent_one_after_the_other() -> None:
    one = 4 * 64 * 1024
    state = 16 * one
    (gathered, cut), (sent, cut_too) = on_ranks(2, _allocated)
    assert state <= gathered <= state + one  # and nothing but them
    assert sent <= one
    assert max(cut, cut_too) <= state / 2 + one

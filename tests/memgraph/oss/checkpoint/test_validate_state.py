"""A state loads if the plain optimizer can resume from it; others are refused on all ranks before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import Replicate

import memgraph
from memgraph import AgreementError, StateError
from tests.memgraph.oss.checkpoint.test_full_state import plain, refusal, same, trained
from tests.memgraph.oss.test_steps import KINDS, groups, net, train
from tests.support.ranks import on_ranks

State = dict[str, Any]


def _others(state: State) -> None:
    """Counts as numbers and as wider tensors, the rest in narrower ones, and parameters without state."""
    del state["state"][1]
    state["state"][3] = {}
    for place, entries in state["state"].items():
        entries |= {
            name: value.bfloat16() for name, value in entries.items() if isinstance(value, Tensor) and value.dim()
        }
        if "step" in entries:
            count = float(entries["step"])
            entries["step"] = int(count) if place % 2 else torch.tensor(count, dtype=torch.float64)


def _goes_on(rank: int) -> list[str]:
    wrong = []
    for name, (kind, options) in KINDS.items():
        _, saved = plain(kind, options, 2)
        state = copy.deepcopy(saved.state_dict())
        _others(state)
        theirs, module = net(), net()
        alone = kind(groups(theirs), **options)
        ours = memgraph.OSS(groups(module), kind, gradients="same", **options)
        alone.load_state_dict(copy.deepcopy(state))
        ours.load_state_dict(state)
        found, wanted = train(module, ours, 2), train(theirs, alone, 2)
        wrong += [] if all(map(torch.equal, found, wanted)) else [name]
    return wrong


def test_what_the_plain_optimizer_goes_on_with_is_loaded() -> None:
    assert on_ranks(2, _goes_on) == [[], []]


def _damaged(state: State) -> dict[str, State]:
    """State dicts of Adam with which something is wrong."""
    names = ("missing", "int64", "one number", "text", "a number", "no values", "rows", "sparse")
    found = {name: copy.deepcopy(state) for name in names}
    of = {name: each["state"][1] for name, each in found.items()}
    del of["missing"]["exp_avg_sq"]
    of["int64"]["exp_avg"] = of["int64"]["exp_avg"].long()
    of["one number"]["exp_avg"] = torch.tensor(0.5)
    of["text"]["step"] = "3"
    of["a number"]["exp_avg"] = 0.5
    of["no values"]["exp_avg"] = torch.empty(5, 7, device="meta")
    of["sparse"]["exp_avg"] = torch.zeros(8).to_sparse()
    return found


def _refused(rank: int) -> dict[str, str]:
    _, ours = trained(optim.Adam, {}, 2)
    before = copy.deepcopy(ours.state_dict(all_ranks=True))
    given = _damaged(before)
    given["rows"]["state"][1]["exp_avg"] = ours.sharded_state_dict()["state"][1]["exp_avg"]
    messages = {name: refusal(StateError, ours.load_state_dict, each) for name, each in given.items()}
    other = copy.deepcopy(before)
    other["state"][2]["step"] += rank
    messages["another step"] = refusal(AgreementError, ours.load_state_dict, other)
    other = copy.deepcopy(before)
    other["state"][2]["exp_avg"] += rank
    messages["another value"] = refusal(AgreementError, ours.load_state_dict, other)
    handle = ours.register_load_state_dict_pre_hook(_hook if rank else lambda *_: None)
    messages["a hook"] = refusal(ArithmeticError if rank else AgreementError, ours.load_state_dict, before)
    handle.remove()
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(ours.inner, "load_state_dict", _hook)
        messages["memory"] = refusal(StateError, ours.load_state_dict, before)
    assert same(before, ours.state_dict(all_ranks=True))
    ours.load_state_dict(before)
    for name, kind, entry in (("Adafactor", optim.Adafactor, "row_var"), ("RMSprop", optim.RMSprop, "square_avg")):
        _, other_kind = trained(kind, {}, 1)
        state = copy.deepcopy(other_kind.state_dict(all_ranks=True))
        state["state"][0][entry] = torch.zeros(4)
        messages[name] = refusal(StateError, other_kind.load_state_dict, state)
        del state["state"][0][entry]
        messages[f"{name} without"] = refusal(StateError, other_kind.load_state_dict, state)
    return messages


def _hook(*_: object) -> None:
    raise ArithmeticError("no")


def test_a_state_that_the_plain_optimizer_fails_with_is_refused_with_what_it_is_and_has_to_be() -> None:
    first, own = on_ranks(2, _refused)
    assert own.pop("a hook") == "no" and {**first, "a hook": ""} == {**own, "a hook": ""}
    texts = {
        name: text.removeprefix("the state dict is not this optimizer's: ").removesuffix("; nothing was changed")
        for name, text in first.items()
    }
    fits = "which does not fit into Adam's float32[5, 7]"
    assert texts["missing"] == "parameter 1 has no 'exp_avg_sq', and Adam's has float32[5, 7]"
    assert texts["int64"] == f"'exp_avg' of parameter 1 is int64[5, 7], {fits}"
    assert texts["one number"] == f"'exp_avg' of parameter 1 is float32[], {fits}"
    assert texts["text"] == "'step' of parameter 1 is str, which does not fit into Adam's float32[]"
    assert texts["a number"] == f"'exp_avg' of parameter 1 is float, {fits}"
    assert texts["no values"] == "'exp_avg' of parameter 1 is float32[5, 7] on the meta device, where it has no values"
    assert texts["rows"].endswith("is float32[5, 7] in rows, a DTensor; give it to load_sharded_state_dict()")
    assert texts["sparse"] == f"'exp_avg' of parameter 1 is float32[8], {fits}"
    assert "the state of parameter 2 in the state dict: step 2.0, exp_avg" in texts["another step"]
    assert "on rank 0; step 3.0" in texts["another step"]
    assert "ranks disagree on the state of parameter 2 in the state dict: step 2.0, exp_avg" in texts["another value"]
    assert "the state dict: fits on rank 0; ArithmeticError: no on rank 1. Load the same" in texts["a hook"]
    assert texts["memory"] == "the state could not be loaded: ArithmeticError: no on rank 1; the optimizer is as it was"
    assert (
        texts["Adafactor"]
        == "'row_var' of parameter 0 is float32[4], which does not fit into Adafactor's float32[7, 1]"
    )
    assert texts["Adafactor without"] == "parameter 0 has no 'row_var', and Adafactor's has float32[7, 1]"
    assert texts["RMSprop"].endswith("is float32[4], which does not fit into RMSprop's float32[7, 11]")
    assert texts["RMSprop without"] == "parameter 0 has no 'square_avg', and RMSprop's has float32[7, 11]"


def _refused_in_rows(rank: int, path: Path) -> list[str]:
    module, ours = trained(optim.Adam, {}, 2)
    before = ours.state_dict(all_ranks=True)
    messages = []

    def texts(change: Callable[[State], None], kind: type[Exception] = StateError) -> None:
        state = ours.sharded_state_dict()
        change(state["state"][0])
        messages.append(refusal(kind, ours.load_sharded_state_dict, state))

    texts(lambda entries: entries.pop("exp_avg"))
    texts(lambda entries: entries.pop("step") if rank else None)
    texts(lambda entries: entries.update(exp_avg=entries["exp_avg"].full_tensor()))
    texts(lambda entries: entries.update(exp_avg=entries["exp_avg"].redistribute(placements=[Replicate()])))
    texts(lambda entries: entries.update(exp_avg=entries["exp_avg"].long()))
    texts(lambda entries: entries.update(more=entries["exp_avg"]) if rank else None, AgreementError)
    original = memgraph.OSS.sharded_state_dict
    for place, change in enumerate((lambda entries: entries.pop("exp_avg"), _whole)):
        with pytest.MonkeyPatch.context() as patch:
            changed = partial(_changed, original, change)
            patch.setattr(memgraph.OSS, "sharded_state_dict", lambda self, changed=changed: changed(self))
            memgraph.save_sharded(path / str(place), module, ours)
        messages.append(refusal(StateError, memgraph.load_sharded, path / str(place), module, ours))
    assert same(before, ours.state_dict(all_ranks=True))
    return [text.replace(str(path), "") for text in messages]


def _whole(entries: State) -> None:
    entries["exp_avg"] = torch.zeros(3, 3)


def _changed(original: Callable[..., State], change: Callable[[State], Any], optimizer: memgraph.OSS) -> State:
    state = original(optimizer)
    change(state["state"][0])
    return state


def test_a_state_in_rows_that_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, own = on_ranks(2, _refused_in_rows, tmp_path)
    assert first == own
    start = "the state dict on rank {} is not this optimizer's: {}; nothing was changed"
    missing = "parameter 0 has no 'exp_avg', and Adam's has float32[7, 11]"
    assert first[0] == start.format(0, missing)
    assert first[1] == start.format(1, "parameter 0 has no 'step', and Adam's has float32[]")
    assert "float32[7, 11] as a whole, and in rows in sharded_state_dict(), a DTensor" in first[2]
    assert "float32[7, 11] in rows as sharded_state_dict() has none: (Replicate(),), [7, 11] on this" in first[3]
    assert "is int64[7, 11], which does not fit into Adam's float32[7, 11]" in first[4]
    assert first[5].startswith("the ranks disagree on the state of parameter 0 in the state dict: ")
    assert first[6] == f"the loading of /0 has failed: {first[0]}"
    assert "'exp_avg' of parameter 0 is float32[3, 3], which does not fit into Adam's float32[7, 11]" in first[7]


def _was_sparse(rank: int) -> bool:
    """Momentum that sparse gradients have left in the plain optimizer."""
    found = []
    for make in (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: memgraph.OSS(p, optim.SGD, lr=0.1, momentum=0.9),
    ):
        torch.manual_seed(0)
        table = nn.Embedding(11, 3, sparse=True)
        optimizer: optim.Optimizer = optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
        for turn in range(4):
            if turn == 2:
                state = optimizer.state_dict()
                assert state["state"][0]["momentum_buffer"].is_sparse
                optimizer = make(table.parameters())
                optimizer.load_state_dict(state)
            table(torch.tensor([turn, 4, 4])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(table.weight.detach())
    torch.testing.assert_close(*found)
    return True


def test_momentum_of_sparse_gradients_is_loaded() -> None:
    assert on_ranks(2, _was_sparse) == [True, True]

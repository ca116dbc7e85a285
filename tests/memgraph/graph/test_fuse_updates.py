"""A step with updates in backward is on the graph what it is in the text, whatever becomes of its values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from memgraph.capture.capture import capture
from memgraph.graph.captured import Captured
from memgraph.graph.fuse_updates import fuse_updates, updated_parameters
from memgraph.graph.rewrite import rewrite
from memgraph.graph.summarize import summarize
from memgraph.guards.module_proxy import WithLoss
from memgraph.optim.trained_parameters import TrainedParameters, movable_states
from memgraph.optim.update_cost import add_update
from memgraph.tensors.loss_outputs import select_scalars
from passes import Link, Machine, Streaming, apply, check, predict
from passes.analysis.reuse_gaps import ReuseGaps
from passes.order.early_updates import update_early
from passes.schedule.schedule import CAST, Placement, schedule
from tests.support.streamed_state import batch, chain, loss

MACHINE = Machine(0, link=Link(out=1000.0, back=1000.0), streaming=Streaming(enabled=True))
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": chain,
    "random": partial(chain, 3, partial(nn.Dropout, 0.3), partial(nn.BatchNorm1d, 256)),
}


def fused(make: Callable[[], nn.Module], leave: str = "") -> tuple[nn.Module, Captured]:
    module = WithLoss(make(), loss)
    names = {name for name, _ in module.named_parameters()} - {leave}
    return module, fuse_updates(capture(module, (batch(),), {}, wanted=select_scalars), names)


@pytest.mark.long
@pytest.mark.parametrize("only", [fate for fate in Placement if fate not in CAST])
@pytest.mark.parametrize("name", MODELS)
def test_the_rewritten_graph_is_what_the_applied_text_says(name: str, only: Placement) -> None:
    _, captured = fused(MODELS[name])
    trace = update_early(summarize(captured.graph.graph))
    gaps = ReuseGaps(trace)
    again = {s: only for s in gaps.producer if s in gaps.whole_value and not trace.op[gaps.producer[s]].once}
    homes = {s: only for s in gaps.streamable.values if only in (Placement.OFFLOAD, Placement.OFFLOAD_BLOCKING)}
    text = apply(trace, schedule(gaps, again | homes, MACHINE))
    check(text)
    assert str(summarize(rewrite(captured.graph.graph, text))) == str(text)


def test_what_is_not_to_be_updated_is_handed_out() -> None:
    module, captured = fused(chain, leave="2.weight")
    assert [role.name for role in captured.outputs if role.kind == "gradient"] == ["2.weight"]
    assert len(updated_parameters(captured.graph.graph)) == len(captured.updates) == len(list(module.parameters())) - 1


def test_each_update_reads_the_states_of_its_own_parameter() -> None:
    module, captured = fused(chain)
    named = dict(module.named_parameters())
    optimizer = torch.optim.Adam(module.parameters())
    inside = {op: named[name] for op, name in updated_parameters(captured.graph.graph).items()}
    trained = TrainedParameters(list(named.values()), movable_states(optimizer), inside)
    trace = add_update(summarize(captured.graph.graph), optimizer, trained, {})
    check(trace)
    states = [op for op in trace.ops if op.fn == "state"]
    large = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    assert [state.nbytes for state in states[:-1]] == [2 * parameter.nbytes for parameter in large]
    for state in states[:-1]:
        (reader,) = (op for op in trace.ops if state.name in op.reads)
        assert 2 * inside[reader.name].nbytes == state.nbytes
        assert reader.workspace >= inside[reader.name].nbytes


def test_what_an_update_takes_in_backward_is_in_the_forecast() -> None:
    module, captured = fused(chain)
    named = dict(module.named_parameters())
    optimizer = torch.optim.Adam(module.parameters())
    inside = {op: named[name] for op, name in updated_parameters(captured.graph.graph).items()}
    bare, trained = (
        summarize(captured.graph.graph),
        TrainedParameters(list(named.values()), movable_states(optimizer), inside),
    )
    trace = add_update(bare, optimizer, trained, {})
    updates = [trace.op[name].us for name in inside]
    assert all(us > 0 for us in updates)
    assert predict(trace, MACHINE).us == pytest.approx(predict(bare, MACHINE).us + sum(updates))

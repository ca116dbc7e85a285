"""Run a submodule on other tensors than its own.

run(layer, inputs, [w, b, x])             ->   layer(x), with w and b in the place of its weight and bias
with on_tensors(layer, inputs, ...): ...  ->   what backward calls of the layer finds w and b as well
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import stateless

from ..errors import CaptureError
from ..graph.result_layout import layout
from ..guards.attribute_snapshot import RNN_CACHES
from ..tensors.pytree import flatten, unflatten
from .inputs import Inputs, Place, described
from .results import Results, results_of


class Ran(NamedTuple):
    """A call's results, its new tensors with their autograd graph, and the buffers that it has written, by position."""

    results: Results
    outputs: list[Tensor]
    written: dict[int, Tensor]


def run(
    module: nn.Module, inputs: Inputs, leaves: Sequence[Tensor], observed: AbstractContextManager[object] | None = None
) -> Ran:
    """Call a submodule, inside of `observed`, with these tensors in the place of its own and of its arguments.

    Raises:
        CaptureError: an op can't do what this call does.
    """
    args, kwargs = unflatten([leaves[x.position] if isinstance(x, Place) else x for x in inputs.leaves], inputs.spec)
    with on_tensors(module, inputs, leaves):
        with observed or nullcontext():
            result = module(*args, **kwargs)
        _refuse_changed_arguments((args, kwargs), inputs, leaves)
        written = {place: leaves[place] for place in inputs.written}
        for name, place in inputs.names.items():
            if (assigned := _attribute(module, name)) is not leaves[place]:
                written[place] = _assignable(assigned, leaves[place], name)
    return Ran(*results_of(result, leaves), written)


@contextmanager
def on_tensors(module: nn.Module, inputs: Inputs, leaves: Sequence[Tensor]) -> Iterator[None]:
    """Put these tensors in the place of the submodule's own in a block."""
    own = {name: leaves[place] for name, place in inputs.names.items()}
    with _own_weight_lists(module), stateless._reparametrize_module(module, own):
        yield


@contextmanager
def accumulated_once(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Refuse a backward in the block that adds several gradients to the `.grad` of a leaf.

    A reversible layer differentiates by itself, in the backward of a node. Eager would add these gradients one by one
    to an existing one.

    Raises:
        CaptureError: there are several.
    """
    added = set[Tensor]()

    def count(leaf: Tensor) -> None:
        if leaf in added:
            raise CaptureError("its backward adds several gradients of a parameter by itself")
        added.add(leaf)

    hooks = [leaf.register_post_accumulate_grad_hook(count) for leaf in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_changed_arguments(arguments: Any, inputs: Inputs, leaves: Sequence[Tensor]) -> None:
    places = {id(leaf): Place("input", place) for place, leaf in enumerate(leaves)}
    now, spec = flatten(arguments)
    found = [places.get(id(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in now]
    if spec != inputs.spec or described(found) != described(inputs.leaves):
        raise CaptureError("forward changes one of its arguments: a list, a dict, or a cache")


@contextmanager
def _own_weight_lists(module: nn.Module) -> Iterator[None]:
    """Restore the lists of weights that recurrent layers keep, which would keep the tensors of a call."""
    layers = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    lists = [{name: vars(layer)[name] for name in RNN_CACHES & vars(layer).keys()} for layer in layers]
    try:
        yield
    finally:
        for layer, before in zip(layers, lists, strict=True):
            vars(layer).update(before)


def _attribute(module: nn.Module, name: str) -> object:
    owner, _, last = name.rpartition(".")
    return getattr(module.get_submodule(owner), last, None)


def _assignable(assigned: object, before: Tensor, name: str) -> Tensor:
    """Return a tensor that forward has put in the place of a buffer."""
    if (
        not isinstance(assigned, Tensor)
        or isinstance(before, nn.Parameter)
        or layout(assigned)[:2] != layout(before)[:2]
    ):
        raise CaptureError(f"forward puts another thing in the place of {name} than a tensor of its dtype and shape")
    return assigned.detach()

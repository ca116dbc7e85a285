"""The gradients of a step that is over, by running the plain module again.

Only for a gradient that arrives for an output for which no backward was planned: forward is repeated with the random
numbers and the buffers that it had, and autograd does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.capture import Ref
from ..capture.reentrant_forward import overwritten_buffers
from ..capture.user_checkpoint import without_checkpoint
from ..graph.captured import Captured
from ..system.locks import PLANNING_LOCK
from ..tensors.pytree import flatten, tensors_of
from ..tensors.versions import refuse_modified, version_of

Gradients = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


def eager_gradients(module: nn.Module, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gradients:
    """Note what forward depends on; the result turns the outputs' gradients into those of parameters, buffers and
    inputs."""
    generator = torch.default_generator.clone_state()  # which takes none of the tensors' memory
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    written = {role.name for role in overwritten_buffers(captured).values()}
    held = dict(module.named_buffers())
    given = tensors_of(flatten((args, kwargs))[0])
    seen = [(tensor, version_of(tensor)) for tensor in (*module.parameters(), *given)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]

    def run(tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        refuse_modified(seen)
        with PLANNING_LOCK, torch.enable_grad(), torch.random.fork_rng(), _casting(casts):
            torch.set_rng_state(generator.get_state())
            if on_gpu:
                torch.cuda.set_rng_state_all(on_gpu)
            # What is written was written already; what it held before is in none of the outputs (see overwritten.py).
            buffers = {name: buffer.clone() if name in written else buffer for name, buffer in held.items()}
            named = dict(module.named_parameters())
            # A checkpoint would run a part in backward, on the module's own buffers, or refuse to be asked by `grad`.
            with without_checkpoint():
                result = torch.func.functional_call(module, named | buffers, args, kwargs)
            outputs = _outputs(result, captured)
        gradients = _differentiate(outputs, [*named.values(), *given], tangents)
        return [*gradients[: len(named)], *[None] * len(held), *gradients[len(named) :]]

    return run


@contextmanager
def _casting(casts: Sequence[tuple[str, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


def _outputs(result: Any, captured: Captured) -> list[Tensor]:
    """The tensors of a module's result that are the outputs of its graph, in the graph's order."""
    leaves, _ = flatten(result)
    count = sum(role.kind == "output" for role in captured.outputs)
    places = {ref.index: i for i, ref in enumerate(captured.leaves) if isinstance(ref, Ref) and ref.kind == "output"}
    return [leaves[places[i]] for i in range(count)]


def _differentiate(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    used = [(output, tangent) for output, tangent in zip(outputs, tangents, strict=True) if tangent is not None]
    wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    found = torch.autograd.grad(
        [output for output, _ in used], [leaves[i] for i in wanted], [tangent for _, tangent in used], allow_unused=True
    )
    gradients: list[Tensor | None] = [None] * len(leaves)
    for i, gradient in zip(wanted, found, strict=True):
        gradients[i] = gradient
    return gradients

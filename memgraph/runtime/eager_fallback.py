"""Gradients for outputs without a planned backward, by running the plain module.

Forward runs once more with the random numbers and the buffers that it had, and autograd does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.reentrant_forward import can_run_again, overwritten_buffers
from ..capture.user_checkpoint import without_checkpoint
from ..errors import MemgraphError
from ..graph.captured import Captured, Ref
from ..graph.draws.host_draws import draws_on_host
from ..guards.attribute_snapshot import AttributeSnapshot
from ..guards.written_attributes import call_leaves, written_attributes
from ..system.locks import PLANNING_LOCK
from ..system.python_random import PythonRandom, restoring_python_random
from ..tensors.pytree import flatten, tensors_of
from ..tensors.versions import version_of

Gradients = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


ADVICE = (
    "a loss was made of outputs without a planned backward, so forward has to run again for their gradients, and {}: "
    "give loss=, which makes the loss part of the step, or run this step again, since backward is planned from all "
    "outputs from now on"
)


def eager_gradients(
    module: nn.Module, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any],
    changes: Callable[[], str],
) -> Gradients:  # fmt: skip
    """Record what forward depends on; the result maps the outputs' gradients to those of parameters, buffers and
    inputs.

    `changes` tells in what the same call would differ from what it was, if forward ran again now.
    """
    generator = torch.default_generator.clone_state()  # counts as no tensor memory
    python = PythonRandom() if draws_on_host(captured.graph.graph) else None
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    written = {role.name for role in overwritten_buffers(captured).values()}
    named_buffers = dict(module.named_buffers())
    attributes = written_attributes(module).held
    leaves, _ = call_leaves(args, kwargs, attributes)
    held = [(attribute, attribute.value) for attribute in attributes]
    inputs = tensors_of(leaves)
    unwritten = [buffer for name, buffer in named_buffers.items() if name not in written]
    seen = [(each, version_of(each), each.data_ptr()) for each in (*module.parameters(), *unwritten, *inputs)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]

    def run(tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        if not can_run_again(captured):
            raise MemgraphError(ADVICE.format("it changes tensors that it reads"))
        if any(version_of(each) != version or each.data_ptr() != address for each, version, address in seen):
            raise MemgraphError(ADVICE.format("a parameter, a buffer or an argument was modified since"))
        with PLANNING_LOCK, torch.enable_grad(), torch.random.fork_rng(), restoring_python_random(), _casting(casts):
            if changed := changes():
                raise MemgraphError(ADVICE.format(changed))
            torch.set_rng_state(generator.get_state())
            if python is not None:
                python.restore()
            if on_gpu:
                torch.cuda.set_rng_state_all(on_gpu)
            # These buffers were already overwritten; no output depends on what they held (`reentrant_forward.py`).
            buffers = {name: buffer.clone() if name in written else buffer for name, buffer in named_buffers.items()}
            named = dict(module.named_parameters())
            # A checkpoint would recompute in backward with the module's own buffers, or refuse `autograd.grad`.
            with without_checkpoint(), AttributeSnapshot(module).restored():
                for attribute, value in held:
                    attribute.fill(value)
                result = torch.func.functional_call(module, named | buffers, args, kwargs)
                outputs = _outputs(result, captured)
        gradients = _differentiate(outputs, [*named.values(), *inputs], tangents)
        return [*gradients[: len(named)], *[None] * len(named_buffers), *gradients[len(named) :]]

    return run


@contextmanager
def _casting(casts: Sequence[tuple[str, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


def _outputs(result: Any, captured: Captured) -> list[Tensor]:
    """Return the tensors of a module's result, and of its attributes, in the order of its graph's outputs."""
    leaves, _ = flatten(result)
    found = [*zip(captured.leaves, leaves, strict=True)]
    for write in captured.writes.items:
        found += zip(write.leaves, write.found(), strict=True)
    tensors = {ref.index: leaf for ref, leaf in found if isinstance(ref, Ref) and ref.kind == "output"}
    return [tensors[i] for i in range(sum(role.kind == "output" for role in captured.outputs))]


def _differentiate(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    used = [(output, tangent) for output, tangent in zip(outputs, tangents, strict=True) if tangent is not None]
    wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    computed = torch.autograd.grad(
        [output for output, _ in used], [leaves[i] for i in wanted], [tangent for _, tangent in used], allow_unused=True
    )
    gradients: list[Tensor | None] = [None] * len(leaves)
    for i, gradient in zip(wanted, computed, strict=True):
        gradients[i] = gradient
    return gradients

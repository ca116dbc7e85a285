"""Run the plain forward once, for the values that Python asks for.

    model(x): if x.isfinite().all(): ...   ->   [Answer("values of torch.bool ()", (True,))]

Nothing is saved for backward, so this takes the memory of inference, unless forward differentiates by itself.
Generators, buffers, attributes, and whatever else forward changes are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ...graph.guard_ops import Scalars, sizes_of, strides_of, values_of
from ...graph.nodes import written_arguments
from ...guards.attribute_snapshot import AttributeSnapshot
from ...guards.module_proxy import all_submodules
from ...guards.what_ran import WhatRan
from ...system.own_generators import OwnStates, own_generators
from ...system.python_random import restoring_python_random
from ..call.call import Call
from ..call.set_gradients import set_gradient_error
from ..python_state.draw_in_graph import drawing_for_real
from ..python_state.refuse_effects import refuse_effects
from ..python_state.refuse_iterators import refuse_iterators
from ..python_state.refuse_reseeding import refuse_reseeding
from ..scripted_functions import unscripted
from ..user_checkpoint import without_checkpoint
from .host_lengths import readable_lengths
from .questions import Answer, ValueMode, question
from .tensor_reads import answering

Recording = Callable[[], AbstractContextManager[object]]
Measure = Callable[[Callable[[], object]], int]  # calls a function, and returns the peak bytes that it allocated


@dataclass(frozen=True)
class ValueRun:
    """The answers, in order, and the peak bytes that the run allocated."""

    answers: tuple[Answer, ...]
    nbytes: int


def run_for_values(call: Call, measure: Measure, recording: Recording = nullcontext) -> ValueRun:
    """Run a call of a module inside of `recording()`, and return the values that it reads.

    Raises whatever forward raises.
    """
    read: list[object] = []  # of what autograd would have saved
    try:
        return _run(call, measure, recording, saved_tensors_hooks(lambda tensor: None, partial(_refuse_backward, read)))
    except Exception:
        if not read:
            raise
    return _run(call, measure, recording, nullcontext())


def _run(call: Call, measure: Measure, recording: Recording, saving: AbstractContextManager[object]) -> ValueRun:
    mode, devices = RecordValues(), {tensor.device.index for tensor in call.tensors if tensor.device.type == "cuda"}
    own = OwnStates(own_generators(call.module))
    ran = WhatRan(all_submodules(call.module))
    leaves = [(role, tensor) for role, tensor in zip(call.inputs, call.tensors, strict=True) if tensor.is_leaf]
    gradients = [leaf.grad for _, leaf in leaves]
    with (
        restoring_python_random(),
        drawing_for_real(),
        torch.random.fork_rng(devices),
        refuse_reseeding(call.module, is_traced=False),
        AttributeSnapshot(call.module, call.tensors, ran).restored() as before,
        refuse_iterators(before),
        refuse_effects(call.inputs, call.tensors, is_traced=False),
        _RestoreWritten((*call.tensors, *(grad for grad in gradients if grad is not None))).restored(),
        without_checkpoint(),
        unscripted(),
        readable_lengths(),
        saving,
        answering(mode),
        recording(),
    ):
        try:
            nbytes = measure(lambda: call.run(call.tensors))
        finally:
            torch.clear_autocast_cache()
            own.restore()
            changed = [role for (role, leaf), grad in zip(leaves, gradients, strict=True) if leaf.grad is not grad]
            for (_, leaf), grad in zip(leaves, gradients, strict=True):
                leaf.grad = grad
    if changed:
        raise set_gradient_error(changed[0].label, "forward")
    return ValueRun(tuple(mode.answers), nbytes)


def _refuse_backward(read: list[object], saved: None) -> NoReturn:
    read.append(saved)
    raise RuntimeError("forward differentiates by itself")


class RecordValues(ValueMode):
    """Records answers while a forward runs on real tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: list[Answer] = []

    def values(self, tensor: Tensor) -> Scalars:
        with _disable_current_modes():
            values = values_of(tensor)
        self.answers.append(Answer(question("values", tensor), values))
        return values

    def sized(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        results = func(*args, **kwargs)
        dtypes = tuple(tensor.dtype for tensor in tree_leaves(results))
        answer = Answer(question(str(func), args[0]), tuple(sizes_of(results)), tuple(strides_of(results)), dtypes)
        self.answers.append(answer)
        return results


class _RestoreWritten(TorchDispatchMode):
    """Copies parameters, buffers and inputs before an op writes to them."""

    supports_higher_order_operators = True  # they are passed on

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = tensors
        self.storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self.copies: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves(written_arguments(func, args, kwargs)) if isinstance(func, OpOverload) else ():
            self._copy(tensor)
        return func(*args, **kwargs)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore what was written at the end of the block."""
        with _unsafe_preserve_version_counter(tuple(self.tensors)):
            try:
                with self:
                    yield
            finally:
                for key, copy in self.copies.items():
                    self.storages[key].copy_(copy)

    def _copy(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            return
        key = tensor.untyped_storage()._cdata
        if key in self.storages and key not in self.copies:
            with _disable_current_modes():
                self.copies[key] = self.storages[key].clone()

"""Train with windowed updates on disk, and compare with plain training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from memgraph.optim.window_memory import OffloadedTensors
from memgraph.optim.windowed_optimizer import WindowedOptimizer
from memgraph.storage.mapped_storage import buffer_slice_of
from memgraph.storage.transfer import offload_tensors
from memgraph.tensors.parameter_groups import state_tensors

Make = Callable[[Any], optim.Optimizer]
SMALL = 200_000  # bytes of a window: a part of any parameter fits, and no whole large one
STEPS = 7  # RAdam's update changes at the sixth step


def made(kind: type[optim.Optimizer], **options: Any) -> Make:
    # A scheduler writes to a learning rate that is a tensor.
    return lambda parameters: kind(parameters, **{key: copy.deepcopy(value) for key, value in options.items()})


OPTIMIZERS: dict[str, Make] = {
    "SGD": made(optim.SGD, lr=0.1),
    "SGD maximize, decay": made(optim.SGD, lr=0.1, maximize=True, weight_decay=0.1),
    "SGD momentum": made(optim.SGD, lr=0.1, momentum=0.9),
    "SGD dampening": made(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "SGD nesterov": made(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": made(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD fused": made(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True),
    "SGD lr tensor": made(optim.SGD, lr=torch.tensor(0.1), momentum=0.9),
    "Adam": made(optim.Adam, lr=0.01, weight_decay=0.1),
    "Adam amsgrad": made(optim.Adam, lr=0.01, amsgrad=True, maximize=True),
    "Adam lr tensor": made(optim.Adam, lr=torch.tensor(0.01)),
    "AdamW": made(optim.AdamW, lr=0.01),
    "AdamW amsgrad": made(optim.AdamW, lr=0.01, amsgrad=True, foreach=False),
    "AdamW foreach": made(optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "AdamW fused": made(optim.AdamW, lr=0.01, fused=True),
    "AdamW fused amsgrad": made(optim.AdamW, lr=0.01, fused=True, amsgrad=True, maximize=True),
    "Adagrad": made(optim.Adagrad, lr=0.01, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    "Adagrad foreach": made(optim.Adagrad, lr=0.01, foreach=True, maximize=True),
    "Adagrad fused": made(optim.Adagrad, lr=0.01, fused=True, weight_decay=0.1),
    "RMSprop": made(optim.RMSprop, lr=0.01),
    "RMSprop centered": made(optim.RMSprop, lr=0.01, centered=True, momentum=0.9, weight_decay=0.1),
    "RMSprop foreach": made(optim.RMSprop, lr=0.01, centered=True, momentum=0.9, maximize=True, foreach=True),
    "Adamax": made(optim.Adamax, lr=0.01, weight_decay=0.1),
    "Adamax foreach": made(optim.Adamax, lr=0.01, weight_decay=0.1, foreach=True, maximize=True),
    "NAdam": made(optim.NAdam, lr=0.01, weight_decay=0.1),
    "NAdam decoupled": made(optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    "RAdam": made(optim.RAdam, lr=0.01, weight_decay=0.1),
    "RAdam decoupled": made(optim.RAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    "Adadelta": made(optim.Adadelta, lr=0.1, weight_decay=0.1),
    "Adadelta foreach": made(optim.Adadelta, lr=0.1, weight_decay=0.1, foreach=True, maximize=True),
    "Rprop": made(optim.Rprop, lr=0.01),
    "Rprop foreach": made(optim.Rprop, lr=0.01, foreach=True, maximize=True),
    "ASGD": made(optim.ASGD, lr=0.01, weight_decay=0.1, t0=2),
    "ASGD foreach": made(optim.ASGD, lr=0.01, weight_decay=0.1, t0=2, foreach=True, maximize=True),
}
LOW_PRECISION = sorted(OPTIMIZERS.keys() - {"SGD fused"})
ALL = OffloadedTensors(lambda p: True, lambda p: True, lambda p: True)
NOT = OffloadedTensors(lambda p: False, lambda p: False, lambda p: False)


def large(parameter: Tensor) -> bool:
    return parameter.numel() > 10_000


SIDES = {
    "all": ALL,
    "what is large": OffloadedTensors(large, large, large),
    "states": OffloadedTensors(NOT.parameters, NOT.gradients, large),
    "parameters": OffloadedTensors(large, NOT.gradients, NOT.states),
    "gradients": OffloadedTensors(NOT.parameters, large, NOT.states),
    "parameters and states": OffloadedTensors(ALL.parameters, NOT.gradients, ALL.states),
}


@dataclass
class Training:
    """Parameters of several sizes and strides, an optimizer, and gradients from fixed seeds."""

    parameters: list[nn.Parameter]
    optimizer: optim.Optimizer
    far: OffloadedTensors
    folder: Path
    windowed: WindowedOptimizer | None = None
    done: int = 0

    def gradients(self) -> None:
        generator = torch.Generator().manual_seed(self.done)
        self.done += 1
        for i, parameter in enumerate(self.parameters):
            # The last parameter never gets a gradient; the last but one gets none in every third step.
            last = i >= len(self.parameters) - 1 - (self.done % 3 == 0)
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = None if last else self.at_home(gradient, self.far.gradients(parameter))

    def at_home(self, tensor: Tensor, far: bool) -> Tensor:
        return offload_tensors([tensor], self.folder)[0] if far else tensor

    def steps(self, count: int = STEPS) -> Training:
        for _ in range(count):
            self.gradients()
            self.optimizer.step()
        return self


def parameters_of() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)

    def parameter(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = [parameter(70, 300), parameter(40_001), parameter(3), parameter(), parameter(0, 4)]
    tensors += [parameter(1000, 33).t(), parameter(5, 7), parameter(20_000)]
    return [nn.Parameter(tensor) for tensor in tensors]


def training(folder: Path, make: Make, far: OffloadedTensors | None, nbytes: int = SMALL) -> Training:
    """Return a windowed training if `far` is given, otherwise a plain one."""
    parameters = parameters_of()
    optimizer = make(parameters)
    made = Training(parameters, optimizer, far or NOT, folder)
    if far:
        for one in parameters:
            one.data = made.at_home(one.data, far.parameters(one))
        made.windowed = WindowedOptimizer(optimizer, nbytes, far.states, folder)
    return made


def assert_equal(left: Training, right: Training, strides: bool = True) -> None:
    """Check that parameters, gradients, states and options are bit-equal."""
    for one, other in zip(left.parameters, right.parameters, strict=True):
        assert same(one.data, other.data)
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or (other.grad is not None and same(one.grad, other.grad))
        states, others = left.optimizer.state.get(one), right.optimizer.state.get(other)
        assert (states is None) == (others is None)
        if states is not None and others is not None:
            assert list(states) == list(others)
            assert all(same(states[key], others[key]) for key in states)
            if strides:
                assert [states[key].stride() for key in states] == [others[key].stride() for key in states]
    options, others = (made.optimizer.state_dict()["param_groups"] for made in (left, right))
    assert str(options) == str(others)


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def far_of(made: Training) -> set[int]:
    """Return the numbers of tensors on disk, over all parameters."""
    tensors = [(p, p.grad, *made.optimizer.state.get(p, {}).values()) for p in made.parameters]
    return {sum(isinstance(one, Tensor) and buffer_slice_of(one) is not None for one in row) for row in tensors}


def near_states(one: Training) -> Iterator[Tensor]:
    return (tensor for tensor in state_tensors(one.optimizer) if buffer_slice_of(tensor) is None)

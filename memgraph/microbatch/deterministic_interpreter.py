"""A graph run without chance: what would be drawn is the same in every row, and as large as is to be expected.

    mask = bernoulli(x, 0.9)     ->   mask = 0.9 everywhere           # so that dropout changes nothing
    noise = randn([5, 4])        ->   noise = 1 everywhere

So runs on different numbers of rows can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import CaptureError
from ..graph.nodes import is_random
from ..graph.summarize import draws, has_own_generator

NodeValues = Mapping[str, Any]
# What is drawn, by the arguments of the op: a number, or a tensor that is expanded.
EXPECTED_DRAWS: dict[str, Callable[[NodeValues], Any]] = {
    "bernoulli": lambda given: given["self"] if given.get("p") is None else given["p"],
    "rand": lambda given: 0.5,
    "rand_like": lambda given: 0.5,
    "uniform": lambda given: (given["from"] + given["to"]) / 2,
    "randn": lambda given: 1.0,
    "randn_like": lambda given: 1.0,
    "normal": lambda given: given["mean"] + given["std"],
    "normal_functional": lambda given: given["mean"] + given["std"],
    "exponential": lambda given: 1 / given["lambd"],
    "geometric": lambda given: 1 / given["p"],
    "log_normal": lambda given: 1.0,
    "cauchy": lambda given: given["median"],
    "randint": lambda given: given.get("low", 0),
    "randint_like": lambda given: given.get("low", 0),
    "random": lambda given: given.get("from", 0),
    "randperm": lambda given: torch.arange(given["n"]),
    "poisson": lambda given: given["self"],
    "binomial": lambda given: given["count"] * given["prob"],
    "_standard_gamma": lambda given: given["self"],
}
RATES = ("dropout_p", "dropout")  # arguments with which an op drops by itself


class DeterministicInterpreter(fx.Interpreter):
    """Runs a graph in which nothing is drawn.

    Raises:
        CaptureError: it draws in a way of which nobody can say here what is to be expected.
    """

    def run_node(self, n: fx.Node) -> Any:
        if not draws(n) and not has_own_generator(n):
            return super().run_node(n)
        target: Any = n.target
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        names = [argument.name for argument in target._schema.arguments]
        given = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
        given |= dict(zip(names, args, strict=False)) | kwargs
        return _expected(n, given)


def _expected(node: fx.Node, given: dict[str, Any]) -> Any:
    target: Any = node.target
    name = target._schema.name.removeprefix("aten::").rstrip("_")
    if name == "native_dropout":
        return given["input"].clone(), torch.ones_like(given["input"], dtype=torch.bool)
    rates = [rate for rate in RATES if rate in given]
    if is_random(node) and rates:
        return _called(target, given | dict.fromkeys(rates, 0.0))
    if name not in EXPECTED_DRAWS:
        raise CaptureError(
            f"forward draws with {target}, and whether its rows depend on how many there are can't be seen through "
            "that: use microbatches=1, or draw outside of the module"
        )
    fake, drawn = node.meta["val"], EXPECTED_DRAWS[name](given)
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return made.copy_(drawn) if isinstance(drawn, Tensor) else made.fill_(drawn)


def _called(target: Any, given: NodeValues) -> Any:
    arguments = target._schema.arguments
    args = [given[argument.name] for argument in arguments if not argument.kwarg_only]
    return target(*args, **{argument.name: given[argument.name] for argument in arguments if argument.kwarg_only})

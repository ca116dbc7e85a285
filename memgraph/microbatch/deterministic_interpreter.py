"""Run a graph with expected values in place of random numbers.

    mask = bernoulli(x, 0.9)     ->   mask = 0.9 everywhere           # so dropout changes nothing
    noise = randn([5, 4])        ->   noise = 1 everywhere

All rows get the same, so runs on different numbers of rows can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import CaptureError
from ..graph.nodes import is_random
from ..graph.summarize import draws, has_own_generator

Arguments = Mapping[str, Any]
# A number, or a tensor that is expanded, by the arguments of the op.
EXPECTED_DRAWS: dict[str, Callable[[Arguments], Any]] = {
    "bernoulli": lambda given: given["self"] if given.get("p") is None else given["p"],
    "rand": lambda given: 0.5,
    "uniform": lambda given: (given["from"] + given["to"]) / 2,
    "randn": lambda given: 1.0,
    "normal": lambda given: given["mean"] + given["std"],
    "exponential": lambda given: 1 / given["lambd"],
    "geometric": lambda given: 1 / given["p"],
    "log_normal": lambda given: 1.0,
    "cauchy": lambda given: given["median"],
    "randint": lambda given: given.get("low", 0),
    "random": lambda given: given.get("from", 0),
    "randperm": lambda given: torch.arange(given["n"]),
    "poisson": lambda given: given["self"],
    "binomial": lambda given: given["count"] * given["prob"],
    "_standard_gamma": lambda given: given["self"],
    "memgraph_host::generator_state": lambda given: 0,
    "memgraph_host::set_generator": lambda given: 0,
}
DROPOUT_RATES = ("dropout_p", "dropout")  # arguments of ops that drop out internally


class DeterministicInterpreter(fx.Interpreter):
    """
    Raises:
        CaptureError: the graph draws with an op whose expected value is not known here.
    """

    def run_node(self, n: fx.Node) -> Any:
        if not draws(n) and not has_own_generator(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        schema = n.target._schema.arguments  # type: ignore[union-attr]
        given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        return _expected(n, given | dict(zip([argument.name for argument in schema], args, strict=False)) | kwargs)


def _expected(node: fx.Node, given: Arguments) -> Any:
    target: Any = node.target
    name = target._schema.name.removeprefix("aten::").rstrip("_")
    if name == "native_dropout":
        return given["input"].clone(), torch.ones_like(given["input"], dtype=torch.bool)
    rates = [rate for rate in DROPOUT_RATES if rate in given]
    if is_random(node) and rates:
        return _call(target, {**given, **dict.fromkeys(rates, 0.0)})
    expected = EXPECTED_DRAWS.get(name.removesuffix("_like").removesuffix("_functional"))
    if expected is None:
        raise CaptureError(
            f"forward draws with {target}, whose result can't be compared for different numbers of rows: "
            "use microbatches=1, or draw outside of the module"
        )
    fake, value = node.meta["val"], expected(given)
    result = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return result.copy_(value) if isinstance(value, Tensor) else result.fill_(value)


def _call(target: Any, given: Arguments) -> Any:
    arguments = target._schema.arguments
    args = [given[argument.name] for argument in arguments if not argument.kwarg_only]
    return target(*args, **{argument.name: given[argument.name] for argument in arguments if argument.kwarg_only})

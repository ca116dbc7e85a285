"""Count the numbers that ops of a step draw from the CPU's generator, so that a rank skips those of other stages.

native_dropout(f32[4, 8], 0.1)    ->    64: two 32-bit numbers for each element
poisson(f32[4])                   ->    None: as many as the values ask for

An op is run once between two states of the generator, and numbers are drawn from the first until it is the second.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from ...graph.nodes import tensors
from ...graph.summarize import draws
from ...profile.generated_arguments import generated_arguments

FIXED = (  # ops whose number of draws follows from their shapes
    *("bernoulli", "bernoulli_", "native_dropout", "dropout", "rand", "rand_like", "uniform", "uniform_"),
    *("randint", "randint_like", "random", "random_", "randperm", "exponential", "exponential_"),
    *("randn", "randn_like", "normal", "normal_", "normal_functional", "rrelu_with_noise_functional"),
)
PERIOD = 624  # numbers from which the generator makes its next ones, all at once
NUMBERS = slice(24, 24 + 8 * PERIOD)  # where they are in its state
BUFFER = 1024  # numbers that are skipped at once
LIMIT = 8  # numbers for each element, at most

Counts = dict[str, int]


def draw_counts(graph: fx.Graph) -> Counts | None:
    """Return the numbers that each op of forward draws, in the order of the ops; None if that is not known before."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and draws(node)]
    known: dict[str, int | None] = {}
    counts: Counts = {}
    for node in nodes:
        key = _key(node)
        if key not in known:
            known[key] = _count(node) if node.meta.get("phase", "forward") == "forward" else None
        count = known[key]
        if count is None:
            return None
        counts[node.name] = count
    return counts


def skip(generator: torch.Generator, count: int) -> None:
    """Draw so many numbers, and forget them."""
    numbers = torch.empty(min(count, BUFFER), dtype=torch.int32)
    for part in _parts(numbers, count):
        part.random_(generator=generator)


def _parts(numbers: Tensor, count: int) -> Iterator[Tensor]:
    while count:
        yield numbers[:count]
        count -= min(count, len(numbers))


def _key(node: fx.Node) -> str:
    """Describe an op with the shapes that it reads and makes."""
    described = [f"{value.dtype} {tuple(value.shape)} {value.stride()}" for value in _values(node)]
    constants = [each for each in (*node.args, *node.kwargs.items()) if not isinstance(each, fx.Node)]
    return f"{node.target} {described} {constants} {node.meta.get('phase', 'forward')}"


def _values(node: fx.Node) -> list[Tensor]:
    return [value for each in (*node.all_input_nodes, node) for value in tensors(each)]


def _count(node: fx.Node) -> int | None:
    """Return how many numbers an op draws; None if that depends on values, or can't be told."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._opname not in FIXED:
        return None
    default, before = torch.default_generator, torch.default_generator.get_state()
    with torch.no_grad(), torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
        args, kwargs = generated_arguments(node, torch.device("cpu"), 0, False)
        try:
            node.target(*args, **kwargs)
            after = default.get_state()
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return None  # this op does not accept generated values
        finally:
            default.set_state(before)
    del args, kwargs
    return _distance(before, after, LIMIT * sum(value.numel() for value in _values(node)) + PERIOD)


def _distance(before: Tensor, after: Tensor, limit: int) -> int | None:
    """Return how many numbers are drawn between two states; None if that is not all that differs."""
    generator, count = torch.Generator(), 0
    generator.set_state(before)
    earlier = before
    while not torch.equal(generator.get_state()[NUMBERS], after[NUMBERS]):
        if count > limit:
            return None
        earlier = generator.get_state()
        skip(generator, PERIOD)
        count += PERIOD
    if count:
        generator.set_state(earlier)
        count -= PERIOD
    for more in range(2 * PERIOD + 1):
        if torch.equal(generator.get_state(), after):
            return count + more
        skip(generator, 1)
    return None

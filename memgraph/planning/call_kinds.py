"""The kinds of calls that a module has had, and a warning when there are ever more: each is captured and planned.

x of 200, 199, 198 rows   ->   "x, dimension 0 (200, 199, 198), differs from call to call ...: pad it to multiples"
scale=0.1, 0.2, 0.3       ->   "scale (0.1, 0.2, 0.3) differs ...: give a tensor instead of the number"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from itertools import chain
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from ..guards.assumptions import ANY, ARGUMENTS, ATTRIBUTES, TENSORS, Facts, TensorFact, number_kind

MANY_SIZES = 3  # different sizes or numbers in one argument: then warn
MANY_ALIKE = 6  # calls with equal arguments: training, eval, and each with and without gradients make four
PAD = "pad it to a few sizes, as multiples of 8 or 64"
DROP = "if it is that of the batch, leave out a smaller last one (drop_last=True of a DataLoader)"
TENSOR = "give a tensor instead of the number"
TEXT = "leave it out of the arguments if forward does not read it"
REST = "time_limit= shortens planning, and plan= spares it"

ArgumentPath = str  # "x, dimension 1", or the name of a value


def kinds_warning(facts: Facts, earlier: Sequence[Facts], names: Sequence[str], others: Sequence[str] = ()) -> str:
    """Return a warning if the kind of a call is one of ever more; empty otherwise.

    Args:
        earlier: the facts of kinds before it, the latest first.
        names: of its arguments.
        others: what else has changed since the most similar of them.
    """
    calls = [facts, *earlier]
    alike = [each for each in calls if _form(each) == _form(facts)]
    sizes = [_sizes(each[ARGUMENTS], names) for each in alike][:MANY_ALIKE]
    differ = {path: list(dict.fromkeys(each.get(path) for each in reversed(sizes))) for path in sizes[0]}
    differ = {path: values for path, values in differ.items() if len(values) >= MANY_SIZES}
    if differ:
        texts = {name for name, token in zip(names, facts[ARGUMENTS], strict=False) if _kind(token) is str}
        advice = dict.fromkeys(chain.from_iterable(_advice(path, texts) for path in differ))
        which = "; ".join(f"{path} ({', '.join(map(str, values[-MANY_SIZES:]))})" for path, values in differ.items())
        return (
            f"{which} differs from call to call, and each kind of call is captured and planned: "
            f"{', and '.join(advice)}; {REST}"
        )
    count = len({each for each in calls if each[ARGUMENTS] == facts[ARGUMENTS]})
    if count >= MANY_ALIKE:
        what = ", ".join(others) or "an attribute of the module, its parameters or a mode of torch"
        return (
            f"{count} calls with equal arguments were each captured and planned: {what} differs each time; make it a "
            f"buffer or an argument; {REST}"
        )
    return ""


def argument_names(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return the name of each argument of forward, with the indices inside it."""
    own = _names(module)
    return [_name(path, own) for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]


def _name(path: Sequence[Any], own: Sequence[str]) -> str:
    where, first, *rest = (getattr(part, "idx", getattr(part, "key", part)) for part in path)
    if where == 0:
        first = own[first] if first < len(own) else f"argument {first}"
    return f"{first}{''.join(f'[{part!r}]' for part in rest)}"


def _form(facts: Facts) -> Hashable:
    """Return the facts but for sizes, numbers and texts of arguments, numbers of attributes, and variables.

    Numbers of attributes may be any for one kind and not for another; the groups of variables come later.
    """
    return (
        tuple(
            (token.layout.dtype, len(token.layout.shape)) if isinstance(token, TensorFact) else _kind(token) or token
            for token in facts[ARGUMENTS]
        ),
        facts[TENSORS:ATTRIBUTES],
        tuple(number_kind(token) or token for token in facts[ATTRIBUTES]),
    )


def _sizes(arguments: Sequence[Hashable], names: Sequence[str]) -> Mapping[ArgumentPath, Hashable]:
    """Return sizes, numbers and texts by name."""
    sizes: dict[ArgumentPath, Hashable] = {}
    for name, token in zip(names, arguments, strict=False):
        if isinstance(token, TensorFact):
            sizes |= {f"{name}, dimension {i}": size for i, size in enumerate(token.layout.shape)}
        elif isinstance(token, tuple) and _kind(token) is not None and token[1] != ANY:
            sizes[name] = token[1]
    return sizes


def _names(module: nn.Module) -> list[str]:
    """Return the names of forward's positional parameters."""
    forward: Callable[..., Any] = module.forward
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _kind(token: Hashable) -> Hashable:
    """Return the type of a number or a text among the facts; None for another fact."""
    is_text = isinstance(token, tuple) and len(token) == 2 and token[0] is str
    return str if is_text else number_kind(token)


def _advice(path: ArgumentPath, texts: Set[str]) -> list[str]:
    if ", dimension " not in path:
        return [TEXT if path in texts else TENSOR]
    return [PAD, DROP] if path.endswith(", dimension 0") else [PAD]

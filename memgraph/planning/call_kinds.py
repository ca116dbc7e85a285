"""The kinds of calls that a module has had, and a warning when there are ever more: each is captured and planned.

x of 200, 199, 198 rows   ->   "x, dimension 0 (200, 199, 198), differs from call to call ...: pad it to multiples"
scale=0.1, 0.2, 0.3       ->   "scale (0.1, 0.2, 0.3) differs ...: give a tensor instead of the number"
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

MANY_SIZES = 3  # different sizes or numbers in one argument: then warn
MANY_ALIKE = 6  # calls with equal sizes: training, eval, and each with and without gradients make four
KEPT = 16  # forms of calls that are counted; the least recent one is dropped
PAD = "pad it to a few sizes, as multiples of 8 or 64"
DROP = "if it is that of the batch, leave out a smaller last one (drop_last=True of a DataLoader)"
TENSOR = "give a tensor instead of the number"
REST = "time_limit= shortens planning, and plan= spares it"

ArgumentPath = str  # "x, dimension 1", or the name of a value


class CallKinds:
    """Counts the kinds of calls by form: calls of one form differ in sizes and numbers only."""

    def __init__(self, module: nn.Module) -> None:
        self.names = _names(module)
        self.number = 0
        self._sizes: OrderedDict[Hashable, list[dict[ArgumentPath, Any]]] = OrderedDict()
        self._has_warned = False

    def warning(self, args: tuple[Any, ...], kwargs: dict[str, Any], variables: Sequence[str] = ()) -> str:
        """Count one more kind, and return a warning, once; empty if there is none.

        Args:
            variables: names of those outside of the module's attributes that have changed.
        """
        self.number += 1
        form, sizes = self._form(args, kwargs)
        of_form = self._sizes.setdefault(form, [])
        self._sizes.move_to_end(form)
        while len(self._sizes) > KEPT:
            self._sizes.popitem(last=False)
        of_form.append(sizes)
        del of_form[:-MANY_ALIKE]
        text = "" if self._has_warned else _warning(of_form, variables)
        self._has_warned = self._has_warned or bool(text)
        return text

    def forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget the calls of this form: what differed is an input of the graph now."""
        self._sizes.pop(self._form(args, kwargs)[0], None)

    def leaf_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Return the name of each argument, with the indices inside it."""
        return [self._name(path) for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]

    def _form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, dict[ArgumentPath, Any]]:
        """Return the types of the arguments, and their sizes and numbers by name."""
        form: list[Hashable] = []
        sizes: dict[ArgumentPath, Any] = {}
        leaves = [leaf for _, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]]
        for name, leaf in zip(self.leaf_names(args, kwargs), leaves, strict=True):
            if isinstance(leaf, Tensor):
                form.append((name, leaf.dtype, leaf.dim()))
                sizes |= {f"{name}, dimension {i}": int(size) for i, size in enumerate(leaf.shape)}
            else:
                form.append((name, type(leaf)))
                sizes |= {name: leaf} if isinstance(leaf, int | float) else {}
        return tuple(form), sizes

    def _name(self, path: Sequence[Any]) -> str:
        """Return the argument's name in forward, and the indices inside it."""
        where, first, *rest = (getattr(part, "idx", getattr(part, "key", part)) for part in path)
        if where == 0:
            first = self.names[first] if first < len(self.names) else f"argument {first}"
        return f"{first}{''.join(f'[{part!r}]' for part in rest)}"


def _names(module: nn.Module) -> list[str]:
    """Return the names of forward's positional parameters."""
    forward: Callable[..., Any] = module.forward
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _advice(path: ArgumentPath) -> list[str]:
    if ", dimension " not in path:
        return [TENSOR]
    return [PAD, DROP] if path.endswith(", dimension 0") else [PAD]


def _warning(calls: Sequence[dict[ArgumentPath, Any]], variables: Sequence[str]) -> str:
    latest = calls[-1]
    differ = {path: list(dict.fromkeys(sizes.get(path) for sizes in calls)) for path in latest}
    differ = {path: values for path, values in differ.items() if len(values) >= MANY_SIZES}
    if differ:
        advice = dict.fromkeys(chain.from_iterable(map(_advice, differ)))
        which = "; ".join(f"{path} ({', '.join(map(repr, values[-MANY_SIZES:]))})" for path, values in differ.items())
        return (
            f"{which} differs from call to call, and each kind of call is captured and planned: "
            f"{', and '.join(advice)}; {REST}"
        )
    if len(calls) >= MANY_ALIKE and all(sizes == latest for sizes in calls):
        what = ", ".join(variables) or "an attribute of the module, its parameters or a mode of torch"
        return (
            f"{len(calls)} calls with arguments of equal sizes were each captured and planned: {what} differs each "
            f"time; make it a buffer or an argument; {REST}"
        )
    return ""

"""The kinds of calls that a module has had, and a warning when they do not end: each is captured and planned anew.

x of 200, 199, 198 rows   ->   "x, dimension 0 (200, 199, 198), differs from call to call ...: pad it to multiples"
scale=0.1, 0.2, 0.3       ->   "scale (0.1, 0.2, 0.3) differs ...: give a tensor instead of the number"
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

SAID = 3  # kinds of a sort after which it is said
STILL = 6  # kinds of calls with the same arguments: training, eval and gradients that are there make four
SORTS = 16  # that are looked at; the one that came longest ago goes first
PAD = "pad it to a few lengths, to multiples of 64 say"
TENSOR = "give a tensor instead of the number"
REST = "time_limit= shortens planning, and plan= spares it"

ArgumentPath = str  # "x, dimension 1", or the name of a value


class CallKinds:
    """Counts the kinds of calls by sort: those whose arguments differ in sizes and Python values alone."""

    def __init__(self, module: nn.Module) -> None:
        self.names = _names(module)
        self.number = 0
        self._sorts: OrderedDict[Hashable, list[dict[ArgumentPath, Any]]] = OrderedDict()
        self._said = False

    def warning(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Count one more kind; return what is to be said of it, mostly nothing, and once at most."""
        self.number += 1
        sort, sizes = self._described(args, kwargs)
        seen = self._sorts.setdefault(sort, [])
        self._sorts.move_to_end(sort)
        while len(self._sorts) > SORTS:
            self._sorts.popitem(last=False)
        seen.append(sizes)
        del seen[:-STILL]
        text = "" if self._said else _text(seen)
        self._said = self._said or bool(text)
        return text

    def forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget the kinds of this sort: what differed is an input of the graph now."""
        self._sorts.pop(self._described(args, kwargs)[0], None)

    def _described(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, dict[ArgumentPath, Any]]:
        sort: list[Hashable] = []
        sizes: dict[ArgumentPath, Any] = {}
        for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
            name = self._name(path)
            if isinstance(leaf, Tensor):
                sort.append((name, leaf.dtype, leaf.dim()))
                sizes |= {f"{name}, dimension {i}": int(size) for i, size in enumerate(leaf.shape)}
            else:
                sort.append((name, type(leaf)))
                sizes |= {name: leaf} if isinstance(leaf, int | float) else {}
        return tuple(sort), sizes

    def _name(self, path: Sequence[Any]) -> str:
        """The argument's name in forward, with the way into it."""
        where, first, *rest = (getattr(part, "idx", getattr(part, "key", part)) for part in path)
        if where == 0:
            first = self.names[first] if first < len(self.names) else f"argument {first}"
        return f"{first}{''.join(f'[{part!r}]' for part in rest)}"


def _names(module: nn.Module) -> list[str]:
    """The names of what forward takes by position."""
    forward: Callable[..., Any] = module.forward
    try:
        given = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one.name for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _text(seen: Sequence[dict[ArgumentPath, Any]]) -> str:
    latest = seen[-1]
    differ = {place: list(dict.fromkeys(sizes.get(place) for sizes in seen)) for place in latest}
    differ = {place: values for place, values in differ.items() if len(values) >= SAID}
    if differ:
        advice = dict.fromkeys(PAD if ", dimension " in place else TENSOR for place in differ)
        which = "; ".join(f"{place} ({', '.join(map(repr, values[-SAID:]))})" for place, values in differ.items())
        return f"{which} differs from call to call, and each kind of call is captured and planned anew: " + (
            f"{', and '.join(advice)}; {REST}"
        )
    if len(seen) >= STILL and all(sizes == latest for sizes in seen):
        return (
            f"{len(seen)} calls with arguments of the same sizes were captured and planned anew: an attribute of the "
            f"module, its parameters or a mode of torch is another each time; make it a buffer or an argument; {REST}"
        )
    return ""

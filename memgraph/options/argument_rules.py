"""What a caller may give, as one table: an argument becomes a value of the kind that is wanted, or an error.

    fuse_update=numpy.True_   ->   True
    microbatches=0            ->   ValueError: microbatches=0; give the number of parts of a batch, 1 for the whole
    fuse_update="yes"         ->   TypeError: fuse_update is a str, 'yes'; give True or False

What else may be wrong with a value depends on the model, the device or other arguments, and is checked where that is
known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Number, Real
from os import PathLike, fsdecode
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from ..report.saved_plan import SavedPlan
from ..storage.pinned_pool import PINNED
from ..system.byte_sizes import BUDGET


@dataclass(frozen=True)
class Rule:
    """The kinds of values that an argument takes, what to do about any other, and which of those values `fit`; None
    does, if it is taken.  `but` are kinds that would pass for one of them."""

    kinds: tuple[type, ...]
    advice: str
    fit: Callable[[Any], bool] = lambda _: True
    but: tuple[type, ...] = ()


def one_of(*choices: object, advice: str = "") -> Rule:
    """Of the argument that takes these values."""
    kinds = tuple(dict.fromkeys(map(type, choices)))
    return Rule(kinds, advice or f"give one of {', '.join(map(repr, choices))}", choices.__contains__)


FLAG = Rule((bool,), "give True or False")
COMPILE_RULES: Mapping[str, Rule] = {
    "model": Rule((nn.Module,), "memgraph compiles a torch.nn.Module"),
    "budget": Rule((str, int, float, NoneType), BUDGET.forms),
    "budgets": Rule((list, tuple, range, NoneType), "give a list of budgets, or None for a spread of them", bool),
    "optimizer": Rule((optim.Optimizer, NoneType), "give a torch.optim.Optimizer of the model's parameters"),
    "loss": Rule(
        (Callable, NoneType),  # type: ignore[arg-type]
        "give a function of the model's result and, if there is one, the target",
        but=(type,),
    ),
    "offload": Rule((str, NoneType), 'give "auto", "disk", "host" or None'),
    "spill_dir": Rule((str, PathLike, NoneType), "give the path of a folder", lambda folder: folder != ""),
    "plan": Rule(
        (SavedPlan, str, PathLike),
        "give a SavedPlan, its JSON text, or the path of a file; a report's to_json() is such a text",
    ),
    "time_limit": Rule(
        (float, NoneType),
        "give seconds, 0 for the quickest plan, or None for no limit",
        lambda seconds: seconds >= 0,
    ),
    "wire_dtype": Rule((torch.dtype, NoneType), "give torch.bfloat16, or None for no cast"),
    "microbatches": Rule((int,), "give the number of parts of a batch, 1 for the whole", lambda count: count > 0),
    "reduction": one_of(
        "mean", "sum", None, advice='give "mean", "sum", or None if the loss is that of the whole batch'
    ),
    "accumulate": Rule((bool, NoneType), "give True or False, or None to be warned if it does not fit"),
    "forwards": Rule(
        (int,),
        "give the number of forwards that are open at once, 1 if each has its backward before the next",
        lambda count: count > 0,
    ),
    "fuse_update": FLAG,
    "host_update": FLAG,
    "lower": one_of("auto", "inductor", None),
    "strict": FLAG,
    "pinned": Rule((str, int, float, NoneType), PINNED.forms),
    "cuda_graphs": one_of(True, False, "auto", advice='give True, False or "auto"'),
}
SHARDED_RULES: Mapping[str, Rule] = {
    "params": Rule(
        (Iterable,),
        "give an iterable of parameters or of dicts, as model.parameters()",
        but=(Tensor, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterDict, str),  # and not nn.ParameterList
    ),
    "optim": Rule(
        (type,),
        "give the class of an optimizer, and its options by name: OSS(params, torch.optim.AdamW, lr=3e-4)",
        lambda kind: issubclass(kind, optim.Optimizer),
    ),
    "gradients": one_of("average", "same"),
    "wire_dtype": one_of(torch.bfloat16, torch.float16, None),
    "bucket_bytes": Rule((int,), "give a number of bytes, as 25 << 20", lambda nbytes: nbytes > 0),
    "gather": one_of("step", "forward"),
}
MODEL_RULES = Rule((nn.Module,), "give the torch.nn.Module, plain or compiled, that is trained")
SAVE_RULES: Mapping[str, Rule] = {
    "path": Rule((str, PathLike), "give the name of a file", lambda path: _is_name(path)),
    "model": MODEL_RULES,
    "optimizer": Rule((optim.Optimizer, NoneType), "give the torch.optim.Optimizer of the model, or None"),
}

SAVE_SHARDED_RULES: Mapping[str, Rule] = {
    "folder": Rule((str, PathLike), "give the path of a folder", lambda path: _is_name(path)),
    "model": MODEL_RULES,
}


def check_argument(name: str, given: object, rules: Mapping[str, Rule] = COMPILE_RULES) -> Any:
    """What an argument means, as a value of the first kind that it can be.

    Raises:
        TypeError: it is of no kind that is taken.
        ValueError: it is of such a kind, and no such value is taken.
    """
    rule = rules[name]
    found = [value for kind in rule.kinds for value in _as(kind, given)]
    if not found or isinstance(given, rule.but):
        raise TypeError(f"{name} is {_described(given)}; {rule.advice}")
    if found[0] is not None and not rule.fit(found[0]):
        raise ValueError(f"{name}={given!r}; {rule.advice}")
    return found[0]


def _is_name(path: str | PathLike[str]) -> bool:
    """Whether a file could have this name."""
    name = fsdecode(path)
    return name != "" and "\0" not in name


def _as(kind: type, given: object) -> tuple[Any, ...]:
    """The value as one of this kind, if it is one; numbers and truth values may be numpy's. A truth value is no
    number."""
    if isinstance(given, bool | np.bool_):
        return (bool(given),) if kind is bool else ()
    if kind is int and isinstance(given, Integral):
        return (int(given),)
    if kind is float and isinstance(given, Real):
        return (_float(given),)
    return (given,) if isinstance(given, kind) else ()


def _float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _described(given: object) -> str:
    """What it is, and which, if that is short."""
    if given is None:
        return "None"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    shown = f", {given!r}" if isinstance(given, str | bytes | Number | np.generic | torch.dtype) else ""
    name = type(given).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{shown}"

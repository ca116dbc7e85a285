"""A table of what each argument accepts: an argument becomes a value of the right type, or an error.

    fuse_update=numpy.True_   ->   True
    microbatches=0            ->   ValueError: microbatches=0; give the number of parts of a batch, 1 for the whole
    fuse_update="yes"         ->   TypeError: fuse_update is a str, 'yes'; give True or False

Checks that need the model, the device or other arguments are made where those are known.
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
from ..storage.pinned_pool import HOST
from ..system.byte_sizes import BUDGET, DISK, shortened


@dataclass(frozen=True)
class Rule:
    """The values that one argument accepts.

    Attributes:
        kinds: the types of accepted values.
        advice: what to give instead of another value.
        accepts: returns True for an accepted value; not asked about None.
        excluded: subtypes of `kinds` that are refused.
    """

    kinds: tuple[type, ...]
    advice: str
    accepts: Callable[[Any], bool] = lambda _: True
    excluded: tuple[type, ...] = ()


def one_of(*choices: object, advice: str = "") -> Rule:
    """Return the rule of an argument that accepts these values."""
    kinds = tuple(dict.fromkeys(map(type, choices)))
    return Rule(kinds, advice or f"give one of {', '.join(map(repr, choices))}", choices.__contains__)


def count(of: str, instead: str) -> Rule:
    """Return the rule of an argument that counts something which the device holds, so that its bytes are a number."""
    return Rule((int,), f"give the number of {of}, {instead}, at most {MOST}", lambda number: 0 < number <= MOST)


MOST = 1 << 20
FLAG = Rule((bool,), "give True or False")
COMPILE_RULES: Mapping[str, Rule] = {
    "model": Rule((nn.Module,), "memgraph compiles a torch.nn.Module"),
    "budget": Rule((str, int, float, NoneType), BUDGET.forms),
    "budgets": Rule((list, tuple, range, NoneType), "give a list of budgets, or None for a spread of them", bool),
    "optimizer": Rule((optim.Optimizer, NoneType), "give a torch.optim.Optimizer of the model's parameters"),
    "loss": Rule(
        (Callable, NoneType),  # type: ignore[arg-type]
        "give a function of the model's result and, if there is one, the target",
        excluded=(type,),
    ),
    "offload": Rule((str, NoneType), 'give "auto", "disk", "host" or None'),
    "spill_dir": Rule((str, PathLike, NoneType), "give the path of a folder", lambda folder: folder != ""),
    "plan": Rule(
        (SavedPlan, str, PathLike),
        "give a SavedPlan, its JSON text, or the path of a file; a report's to_json() is such a text",
    ),
    "time_limit": Rule(
        (float, NoneType),
        "give seconds, 0 for the quickest plan, math.inf for no limit, or None for the default",
        lambda seconds: seconds >= 0,
    ),
    "wire_dtype": Rule((torch.dtype, NoneType), "give torch.bfloat16, or None for no cast"),
    "microbatches": count("parts of a batch", "1 for the whole"),
    "reduction": one_of(
        "mean", "sum", None, advice='give "mean", "sum", or None if the loss is that of the whole batch'
    ),
    "accumulate": Rule((bool, NoneType), "give True or False, or None to be warned if it does not fit"),
    "forwards": count("forwards that are open at once", "1 if each has its backward before the next"),
    "fuse_update": FLAG,
    "host_update": FLAG,
    "lower": one_of("auto", "inductor", None),
    "strict": FLAG,
    "host": Rule((str, int, float, NoneType), HOST.forms),
    "disk": Rule((str, int, float, NoneType), DISK.forms),
    "cuda_graphs": one_of(True, False, "auto", advice='give True, False or "auto"'),
    "opaque": Rule(
        (bool, list, tuple),
        'give True, False, or a list of submodules\' paths, as ["encoder.layers.3"]',
        lambda names: isinstance(names, bool) or all(isinstance(name, str) for name in names),
    ),
    "slices": Rule(
        (str, Mapping, NoneType),
        f'give "auto", a mapping of submodules\' paths to numbers of parts, 2 to {MOST}, as {{"lm_head": 16}}, or None',
        lambda asked: asked == "auto" if isinstance(asked, str) else all(map(_is_parts, asked.items())),
    ),
}
SHARDED_RULES: Mapping[str, Rule] = {
    "params": Rule(
        (Iterable,),
        "give an iterable of parameters or of dicts, as model.parameters()",
        excluded=(
            Tensor,
            nn.Sequential,
            nn.ModuleList,
            nn.ModuleDict,
            nn.ParameterDict,
            str,
        ),  # nn.ParameterList is accepted
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
    "optimizer": SAVE_RULES["optimizer"],
}


def check_argument(name: str, given: object, rules: Mapping[str, Rule] = COMPILE_RULES) -> Any:
    """Return an argument as a value of the first type that it can be.

    Raises:
        TypeError: no such type is accepted.
        ValueError: the type is accepted, but not this value.
    """
    rule = rules[name]
    values = [value for kind in rule.kinds for value in _as(kind, given)]
    if not values or isinstance(given, rule.excluded):
        raise TypeError(f"{name} is {_described(given)}; {rule.advice}")
    if values[0] is not None and not rule.accepts(values[0]):
        raise ValueError(f"{name}={shortened(given)}; {rule.advice}")
    return values[0]


def _is_parts(pair: tuple[object, object]) -> bool:
    """Return True for the path of a submodule and its number of parts."""
    path, parts = pair
    return isinstance(path, str) and any(1 < number <= MOST for number in _as(int, parts))


def _is_name(path: str | PathLike[str]) -> bool:
    """Return True if a file can have this name."""
    name = fsdecode(path)
    return name != "" and "\0" not in name


def _as(kind: type, given: object) -> tuple[Any, ...]:
    """Return a value as one of this type, or nothing.  Numbers and bools may be numpy's; a bool is no number."""
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
    """Return the type of a value, and the value if that is short."""
    if given is None:
        return "None"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    shown = f", {shortened(given)}" if isinstance(given, str | bytes | Number | np.generic | torch.dtype) else ""
    name = type(given).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{shown}"

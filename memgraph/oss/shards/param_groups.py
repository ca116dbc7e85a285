"""What the caller gives as parameters, as groups that are nobody else's.

[w, b]  or  [("w", w), ("b", b)]  or  [{"params": [w], "lr": 0.1}, ...]   ->   a list of new dicts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, optim

from ...optim.elementwise import ELEMENTWISE
from ...options.argument_rules import SHARDED_RULES, check_argument

Group = dict[str, Any]


def groups_of(params: Iterable[Any]) -> list[Group]:
    """The caller's groups, copied."""
    given = list(check_argument("params", params, SHARDED_RULES))
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    return list(map(copied, given)) if isinstance(given[0], dict) else [{"params": given}]


def copied(group: Group) -> Group:
    """The same group, to be changed."""
    params = group["params"]
    if isinstance(params, set):  # torch refuses these, and says why
        return dict(group)
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def options(group: Group) -> Group:
    """What of a group is not its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def template(kind: type[optim.Optimizer], groups: Sequence[Group], defaults: Group) -> optim.Optimizer:
    """The optimizer as the caller would have it, to read its options of; it takes no memory.

    It refuses what it refuses. One that is pointwise does not look at shapes, and may make its states at once.
    """
    if kind in ELEMENTWISE:
        groups = [{**group, "params": list(map(_stand_in, group["params"]))} for group in groups]
    return kind(list(map(copied, groups)), **defaults)


def _stand_in(parameter: Any) -> Any:
    if isinstance(parameter, tuple):
        return parameter[0], _stand_in(parameter[1])
    return parameter.detach().new_empty(0) if isinstance(parameter, Tensor) else parameter

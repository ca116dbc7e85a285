"""Python's arithmetic on numbers that are known later, as data and as text.

    (1 - s) ** 2 >= t   ->   Operation("ge", (Operation("pow", ...), Variable(1)))   <->   "(1 - v0) ** 2 >= v1"

An expression evaluates to what Python makes of the numbers: same type, same rounding, same errors.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
}  # fmt: skip
COMPARISONS = {"lt": "<", "le": "<=", "eq": "==", "ne": "!=", "ge": ">=", "gt": ">"}
SIGNS = {"neg": "-", "pos": "+"}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"abs": abs, "int": int, "float": float}
CONSTANTS = {"inf": math.inf, "nan": math.nan}
NODES: dict[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.Lt: "lt", ast.LtE: "le", ast.Eq: "eq", ast.NotEq: "ne", ast.GtE: "ge", ast.Gt: "gt",
    ast.USub: "neg", ast.UAdd: "pos",
}  # fmt: skip


@dataclass(frozen=True)
class Variable:
    """A number that is known later; in a text it is `v` and its key."""

    key: Any


@dataclass(frozen=True)
class Operation:
    """An operation on one or two parts."""

    name: str
    parts: tuple[Part, ...]


Number = float | int | bool
Part = Variable | Operation | Number


def evaluate(part: Part, values: Mapping[Any, Any]) -> Any:
    """Return the value of an expression, given those of its variables."""
    if isinstance(part, Variable):
        return values[part.key]
    if not isinstance(part, Operation):
        return part
    run = FUNCTIONS.get(part.name) or getattr(operator, part.name)
    return run(*(evaluate(inner, values) for inner in part.parts))


def variables(part: Part) -> Iterator[Any]:
    """Return the keys of all variables, in order."""
    if isinstance(part, Variable):
        yield part.key
    elif isinstance(part, Operation):
        for inner in part.parts:
            yield from variables(inner)


def renamed(part: Part, keys: Mapping[Any, Any]) -> Part:
    """Return the expression with other keys."""
    if isinstance(part, Variable):
        return Variable(keys[part.key])
    if isinstance(part, Operation):
        return Operation(part.name, tuple(renamed(inner, keys) for inner in part.parts))
    return part


def text_of(part: Part, is_whole: bool = True) -> str:
    """Return the text of an expression whose variables have numbers as keys."""
    if isinstance(part, Variable):
        return f"v{part.key}"
    if not isinstance(part, Operation):
        text = repr(part)
        return text if is_whole or text[0] != "-" else f"({text})"
    texts = [text_of(inner, part.name in COMPARISONS) for inner in part.parts]
    if part.name in FUNCTIONS:
        return f"{part.name}({text_of(part.parts[0])})"
    sign = SIGNS.get(part.name)
    text = f"{sign}{texts[0]}" if sign else f" {(BINARY | COMPARISONS)[part.name]} ".join(texts)
    return text if is_whole else f"({text})"


@lru_cache(maxsize=4096)
def parse(text: str) -> Part:
    """Return the expression of a text.

    Raises:
        ValueError: it is none.
    """
    return _read(ast.parse(text, mode="eval").body)


def _read(node: ast.expr) -> Part:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.Name(id=name) if name[:1] == "v" and name[1:].isdigit():
            return Variable(int(name[1:]))
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in NODES:
            return _negative(Operation(NODES[type(sign)], (_read(inner),)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in NODES:
            return Operation(NODES[type(op)], (_read(left), _read(right)))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in NODES:
            return Operation(NODES[type(op)], (_read(left), _read(right)))
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in FUNCTIONS:
            return Operation(name, (_read(inner),))
    raise ValueError(f"no expression of numbers: {ast.unparse(node)}")


def _negative(operation: Operation) -> Part:
    """Return a negative number as a number, as it was printed."""
    (part,) = operation.parts
    return -part if operation.name == "neg" and not isinstance(part, Variable | Operation) else operation

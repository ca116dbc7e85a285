"""Steps of layers with one parameter each, as lines of text into which a test inserts ops.

forward("v", "w")    v = parameter(), w = parameter(), ..., a = f(x, v), b = f(a, w)
backward("v", "w")   dw = g(d, a), p = g(d, w), dv = g(p, x)
step("v", "w")       both, and q = g(p, v), as a trace that hands out all gradients
placed_lines(trace)  its lines with collectives in their places
lines(trace)         its ops as they are called, without notes and inputs
"""

from __future__ import annotations

from passes import Trace, check, parse
from passes.order.comm_order import place_collectives

VALUES, TANGENTS = "abc", "pqr"


def forward(*parameters: str) -> str:
    """Return the inputs, and a layer for each parameter; the first reads x, and d is the last one's gradient."""
    inputs = [f"{name} = parameter()" for name in parameters] + ["x = input()", "d = tangent()"]
    reads = zip(f"x{VALUES}", parameters, strict=False)
    return "\n".join(
        [
            *(f"{line}  # u8[100] | makes {line[0]}:100" for line in inputs),
            *(_op(name, "f", *read) for name, read in zip(VALUES, reads, strict=False)),
        ]
    )


def backward(*parameters: str) -> list[str]:
    """Return the gradients of the parameters, from last to first, and between them those of the layers' inputs."""
    return _gradients(*parameters)[:-1]


def step(*parameters: str) -> Trace:
    """Return a whole step, whose outputs include the gradients of the parameters and of x."""
    made = _gradients(*parameters)
    handed = [f"output {VALUES[len(parameters) - 1]}", *(f"gradient d{name}" for name in parameters)]
    handed.append(f"input_gradient {TANGENTS[len(parameters) - 1]}")
    text = ["forward:", forward(*parameters), "backward:", *made, f"return {', '.join(handed)}"]
    return parse("\n".join(text))


def placed_lines(trace: Trace, at_once: bool = False) -> str:
    """Return the lines of a step after its collectives were placed; placing them again changes nothing."""
    found = place_collectives(trace, at_once)
    check(found)
    assert place_collectives(found, at_once) == found
    return lines(found)


def lines(trace: Trace) -> str:
    return "\n".join(str(op).partition("  #")[0] for op in trace.ops if not op.is_input) + "\n"


def _gradients(*parameters: str) -> list[str]:
    """Return the lines of `backward`, and the gradient of x."""
    made = [*zip(f"x{VALUES}", parameters, strict=False)]
    found, above = list[str](), "d"
    for (value, parameter), below in zip(reversed(made), TANGENTS, strict=False):
        found += [_op(f"d{parameter}", "g", above, value), _op(below, "g", above, parameter)]
        above = below
    return found


def _op(name: str, fn: str, *reads: str) -> str:
    return f"{name} = {fn}({', '.join(reads)})  # u8[100] | makes {name}:100 | 10.0 us"

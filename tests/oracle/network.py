"""The step of a network of equal layers, as large as an oracle can just bear.

layers(10)  ->  a hundred ops that make bytes, ten times norm, linear, gelu, linear, add, and their backward
"""

from __future__ import annotations

from passes import Trace, parse


def layers(count: int) -> Trace:
    """A network of `count` layers, five ops forward and five backward each: norm, linear, gelu, linear, add."""
    lines = ["forward:", "x0 = input()  # makes x0:4096", "d = tangent()  # makes d:4"]
    for i in range(count):
        lines += [
            f"n{i} = norm(x{i})  # makes n{i}.0:4096, n{i}.1:128 | 4.0 us",
            f"y{i} = getitem(n{i})  # holds n{i}.0",
            f"r{i} = getitem(n{i})  # holds n{i}.1",
            f"a{i} = linear(y{i})  # makes a{i}:16384 | 40.0 us",
            f"b{i} = gelu(a{i})  # makes b{i}:16384 | 9.0 us",
            f"c{i} = linear(b{i})  # makes c{i}:4096 | 40.0 us",
            f"x{i + 1} = add(x{i}, c{i})  # makes x{i + 1}:4096 | 3.0 us",
        ]
    lines += [
        f"o = sum(x{count})  # makes o:4 | 2.0 us",
        "backward:",
        f"g{count} = expand(d, x{count})  # makes g{count}:4096 | 2.0 us",
    ]
    for i in reversed(range(count)):
        lines += [
            f"gc{i} = linear_backward(g{i + 1}, b{i})  # makes gc{i}.0:16384, gc{i}.1:2048 | 80.0 us",
            f"gb{i} = getitem(gc{i})  # holds gc{i}.0",
            f"wc{i} = getitem(gc{i})  # holds gc{i}.1",
            f"ga{i} = gelu_backward(gb{i}, a{i})  # makes ga{i}:16384 | 12.0 us",
            f"gl{i} = linear_backward(ga{i}, y{i})  # makes gl{i}.0:4096, gl{i}.1:2048 | 80.0 us",
            f"gy{i} = getitem(gl{i})  # holds gl{i}.0",
            f"wa{i} = getitem(gl{i})  # holds gl{i}.1",
            f"gn{i} = norm_backward(gy{i}, x{i}, r{i})  # makes gn{i}:4096 | 8.0 us",
            f"g{i} = add(g{i + 1}, gn{i})  # makes g{i}:4096 | 3.0 us",
        ]
    hands = ", ".join(f"gradient w{part}{i}" for i in range(count) for part in "ca")
    return parse("\n".join([*lines, f"return output o, {hands}"]))

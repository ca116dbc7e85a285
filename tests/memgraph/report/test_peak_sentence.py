"""The sentence about the peak has all of its bytes."""

from __future__ import annotations

import re

from hypothesis import given

from memgraph.report.peak_sentence import peak_sentence
from passes import Machine, Trace, parse, predict
from tests.support.strategies import machines, traces

STEP = parse("""
    forward:
    w = parameter()  # f32[1000, 1000] | makes w:4000000 | at head.weight
    x = input()  # f32[8, 1000] | makes x:32000 | at input_0
    d = tangent()  # f32[] | makes d:4
    y = aten.mm.default(x, w)  # f32[8, 1000] | makes y:32000 | 500.0 us | at head net.py:3
    backward:
    g = aten.mm.default(x, d)  # f32[1000, 1000] | makes g:4000000 | workspace 64000 | 500.0 us | at head net.py:3
    return output y, gradient g
""")


def test_the_op_its_bytes_and_those_of_others_are_named() -> None:
    assert peak_sentence(predict(STEP, Machine(10_000_000))) == (
        "the peak is at op 5 of 5, in backward of head (aten.mm.default): it makes 4.0 MB and takes 64.0 kB of workspace "
        "beside 4.1 MB that are still needed, most of it parameter (4.0 MB)"
    )


@given(traces(), machines())
def test_its_bytes_are_those_of_the_peak(trace: Trace, machine: Machine) -> None:
    forecast = predict(trace, machine)
    text = peak_sentence(forecast)
    units = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
    said = re.findall(r"(?:makes|takes|beside) ([\d.]+) (B|kB|MB|GB)", text)
    staging = int(forecast.by_kind["staging"][forecast.peak_index])
    total = sum(float(number) * units[unit] for number, unit in said) + staging
    rounding = sum(units[unit] / 20 for _, unit in said)
    assert abs(total - forecast.peak) <= rounding + 1

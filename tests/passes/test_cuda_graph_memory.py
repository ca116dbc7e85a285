"""A planned step tells why it can not be recorded, and what a recording keeps."""

from __future__ import annotations

import pytest

from passes import Machine, check, parse, predict
from passes.cuda_graph_memory import add_recording_memory, explain_not_recordable, recording_nbytes

STEP = """
forward:
w = parameter()  # f32[10] | makes w:40
x = input()  # f32[100] | makes x:400
a = relu(x)  # f32[100] | makes a:400 | 10.0 us
y = mm(a, w)  # f32[10] | makes y:40 | 30.0 us
backward:
d = tangent()  # f32[10] | makes d:40
g = mm(d, a)  # f32[10] | makes g:40 | 30.0 us
update:
s = AdamW.step(g, w)  # workspace 1000
return output y, gradient g
"""


def test_nothing_is_in_the_way_of_a_plain_step() -> None:
    assert explain_not_recordable(parse(STEP)) == ""


@pytest.mark.parametrize(
    ("line", "instead", "why"),
    [
        ("x = input()", "x = gradient()", "it adds to gradients that exist already"),
        ("makes w:40", "makes w:0 | offloaded", "state is offloaded"),
        ("a = relu(x)", "a = memgraph.narrow.default(x)", "the host may check the range"),
        ("a = relu(x)", "a = memgraph.swap_rng.default(x)", "draw random numbers a second time"),
        ("g = mm(d, a)", "g = memgraph.offload.default(d)", "state is offloaded"),
        ("d = tangent()  # f32[10] | makes d:40", "d = tangent()  # f32[10] | makes d:40\ne = tangent()  # f32[1] | makes e:4", "for some of its outputs"),
    ],
)  # fmt: skip
def test_what_the_host_does_is(line: str, instead: str, why: str) -> None:
    assert line in STEP
    assert why in explain_not_recordable(parse(STEP.replace(line, instead)))


def test_copies_and_the_updates_workspace_are_there_throughout() -> None:
    plain = parse(STEP)
    assert recording_nbytes(plain) == 400 + 40 + 40 + 1000  # x, d, y and what the update takes
    kept, machine = add_recording_memory(plain), Machine(1 << 20)
    check(kept)
    assert parse(str(kept)) == kept
    assert list(predict(kept, machine).total[1:] - predict(plain, machine).total) == [1480] * len(plain.ops)

"""Steps of any number of layers, and their reports, without a model: what pages of large steps are made of.

long_report(2500)   ->   the report of a step of 20,000 ops; some values are recomputed, some offloaded

Each layer is a product, an activation and a sum, and four ops of backward.
"""

from __future__ import annotations

from memgraph.report.report import Report
from passes import Link, Machine, Offload, Op, Plan, Recompute, Reload, Storage, Trace
from passes.simulate.plan_result import try_plan

WIDTHS = (256, 512, 1024, 768)
ROWS = 128
MACHINE = Machine(1 << 40, link=Link(out=2000.0, back=2000.0, staging=1 << 20, call_us=5.0, us_per_byte=1e-5))


def long_report(layers: int, module: str = "blocks.{}.mlp", budget: int | None = None) -> Report:
    """Return the report of a step of `layers` layers; `module` is the path of a layer, with a place for its number.

    Without a budget, the budget is a twentieth above the peak.
    """
    trace = long_step(layers, module)
    choice = try_plan(every_third(layers), trace, MACHINE)
    assert choice is not None
    peak = choice.forecast.peak
    return Report(Machine(budget or peak + peak // 20, link=MACHINE.link), choice, measured=peak - peak // 50)


def long_step(layers: int, module: str) -> Trace:
    """Return the step as captured."""
    inputs = [_op(f"w_{i}", "parameter", nbytes=4 * _width(i) ** 2 // 64) for i in range(layers)]
    inputs += [_op("x", "input", nbytes=_bytes(0)), _op("tangent", "tangent", nbytes=_bytes(0))]
    forward = [op for i in range(layers) for op in _forward(i, module.format(i))]
    backward = [op for i in reversed(range(layers)) for op in _backward(i, layers, module.format(i))]
    handed = (("output", _sum(layers - 1)), *(("gradient", f"dw_{i}") for i in range(layers)))
    return Trace((*inputs, *forward, *backward), handed)


def every_third(layers: int) -> Plan:
    """Return decisions: of every third layer the activation is recomputed, of every other third the product is offloaded."""
    found: list[Recompute | Offload | Reload] = []
    for i in range(layers - 3):
        if i % 3 == 0:
            found.append(Recompute(f"gelu_{i}", before=f"dw_{i}"))
        if i % 3 == 1:
            found.append(Offload(f"mm_{i}", out=f"gelu_{i}", free=_sum(i + 2)))
            found.append(Reload(f"mm_{i}", back=f"gelu_backward_{i + 2}", use=f"gelu_backward_{i}"))
    return tuple(found)


def _forward(i: int, path: str) -> list[Op]:
    before = _sum(i - 1) if i else "x"
    return [
        _op(
            f"mm_{i}",
            "aten.mm.default",
            before,
            f"w_{i}",
            nbytes=_bytes(i),
            us=90.5 + i % 4,
            where=f"{path}.0 model.py:71",
        ),
        _op(f"gelu_{i}", "aten.gelu.default", f"mm_{i}", nbytes=_bytes(i), us=10.25, where=f"{path}.1 model.py:72"),
        _op(_sum(i), "aten.add.Tensor", f"gelu_{i}", before, nbytes=_bytes(i), us=5.0, where=f"{path} model.py:73"),
    ]


def _backward(i: int, layers: int, path: str) -> list[Op]:
    above, line = f"dx_{i + 1}" if i + 1 < layers else "tangent", f"{path}.1 model.py:72"
    return [
        _op(f"gelu_backward_{i}", "aten.gelu_backward.default", above, f"mm_{i}", nbytes=_bytes(i), us=12.0, where=line, phase="backward"),
        _op(f"dw_{i}", "aten.mm.default", f"gelu_backward_{i}", f"gelu_{i}", nbytes=4 * _width(i) ** 2 // 64, us=95.0, where=f"{path}.0 model.py:71", phase="backward"),
        _op(f"dm_{i}", "aten.mm.default", f"gelu_backward_{i}", f"w_{i}", nbytes=_bytes(i), us=95.0, where=f"{path}.0 model.py:71", phase="backward"),
        _op(f"dx_{i}", "aten.add.Tensor", f"dm_{i}", above, nbytes=_bytes(i), us=5.0, where=f"{path} model.py:73", phase="backward"),
    ]  # fmt: skip


def _op(name: str, fn: str, *reads: str, nbytes: int, us: float = 0.0, where: str = "", phase: str = "forward") -> Op:
    made = Storage(name, nbytes)
    return Op(
        name,
        fn,
        reads,
        (made,),
        (name,),
        phase,
        us,
        workspace=nbytes // 8 * (us > 50),
        type=f"f32[{nbytes // 4}]",
        where=where,
    )


def _sum(i: int) -> str:
    return f"add_{i}"


def _width(i: int) -> int:
    return WIDTHS[i % len(WIDTHS)]


def _bytes(i: int) -> int:
    return 4 * ROWS * _width(i)

"""A browser shows the page: the charts, the keys, the filter, the stories of buffers, in both schemes and to everyone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memgraph
from memgraph.report.budget_curve import Point, Sweep
from tests.memgraph.report.page.conftest import Open
from tests.support.long_steps import long_report

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

EVIL = "</script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">{}"
PIXEL = (
    "([x, y]) => Array.from(document.querySelector('#memory canvas').getContext('2d').getImageData(x, y, 1, 1).data)"
)
INK = """([x, y, width, height]) => {
  const { data } = document.querySelector('#memory canvas').getContext('2d').getImageData(x, y, width, height);
  return data.some((each, i) => i % 4 === 3 && each > 100);
}"""
LINE = """() => {
  const { chart } = document.getElementById('memory'), { bbox } = chart;
  return { ...bbox, max: chart.scales.y.max, dashed: chart.valToPos(chart.scales.y.max / 2, 'y', true),
           labels: chart.axes.map((axis) => axis.label), size: [chart.ctx.canvas.width, chart.ctx.canvas.height] };
}"""


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_opens_without_errors_and_without_requests(opened: Open, scheme: str) -> None:
    page = opened(long_report(12), scheme)
    page.page.check("input[value=time]")
    page.page.hover("#memory .u-over")
    assert page.errors == []
    assert len(page.requests) == 1 and page.requests[0].startswith("file://")


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(opened: Open, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    reports = [long_report(6), long_report(12)]
    page = opened(reports[0], scheme, sweep=reports, beside=reports[1])
    for summary in page.page.locator("summary").all():
        summary.click()
    page.page.locator("#live button").first.click()
    for name in page.page.locator("#which option").all_inner_texts():
        page.page.select_option("#which", name)
        found = axe.Axe().run(page.page)
        assert [each["id"] for each in found.response["violations"]] == []


def test_both_axes_have_a_label_that_is_drawn(opened: Open) -> None:
    page = opened(long_report(12)).page
    seen = page.evaluate(LINE)
    left, bottom = int(seen["left"]), int(seen["top"] + seen["height"])
    assert seen["labels"] == ["Op, in the order in which they run", "On the device, MB"]
    assert page.evaluate(INK, [left, seen["size"][1] - 16, int(seen["width"]), 16])
    assert page.evaluate(INK, [0, int(seen["top"]), 18, bottom - int(seen["top"])])
    page.check("input[value=time]")
    assert page.evaluate(LINE)["labels"][0] == "Time, ms"


def test_the_line_of_the_budget_is_at_the_budget(opened: Open) -> None:
    report = long_report(12)
    page = opened(report).page
    seen = page.evaluate(LINE)
    y = round(seen["top"] + seen["height"] * (1 - report.budget / seen["max"]))
    x = int(seen["left"]) + 3
    chart = page.evaluate(
        "(bytes) => document.getElementById('memory').chart.valToPos(bytes, 'y', true)", report.budget
    )
    assert abs(chart - y) <= 1
    ink = page.evaluate("() => getComputedStyle(document.documentElement).getPropertyValue('--budget')").strip()
    colour = [int(ink[i : i + 2], 16) for i in (1, 3, 5)]
    assert page.evaluate(PIXEL, [x, y])[:3] == colour
    assert all(page.evaluate(PIXEL, [x, y + off])[:3] != colour for off in (-5, 5))


def test_a_budget_far_above_the_peak_is_said_and_not_drawn(opened: Open) -> None:
    page = opened(long_report(12, budget=1 << 30))
    assert any("above the chart" in line for line in page.texts("#lines li"))


def test_keys_step_op_by_op_and_say_where_they_are(opened: Open) -> None:
    report = long_report(12)
    ops = report.forecast.trace.ops
    page = opened(report)
    step = page.page.locator("#step")
    step.focus()
    for key, at in [
        ("Home", 0),
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", len(ops) - 1),
        ("ArrowRight", len(ops) - 1),
    ]:
        page.page.keyboard.press(key)
        assert step.get_attribute("aria-valuenow") == str(at + 1)
        assert page.text("#said").startswith(
            f"Op {at + 1} of {len(ops)}: {ops[at].name}, {ops[at].fn}, {ops[at].where or 'no module'}, "
        )
    assert page.page.locator(".pin").is_visible()
    page.page.keyboard.press("Escape")
    assert not page.page.locator(".pin").is_visible()


def test_the_pointer_names_op_module_and_line(opened: Open) -> None:
    report = long_report(12)
    ops = report.forecast.trace.ops
    page = opened(report)
    width = page.page.locator("#memory .u-over").bounding_box()["width"]
    page.page.hover("#memory .u-over", position={"x": (40 + 0.5) / len(ops) * width, "y": 90})
    module, line = ops[40].where.split(" ")
    assert page.texts(".tip div")[:3] == [f"{ops[40].name} · {ops[40].fn}", module, line]
    assert page.text("#op-title") == f"Op 41 of {len(ops)}: {ops[40].name}"
    shown = sum(int(count) for count in re.findall(r"(\d+) buffers", page.text("#live-title")))
    assert shown == sum(life.nbytes > 0 for life in report.forecast.live_at(40))


def test_a_drag_looks_closer_and_a_key_shows_the_whole_step_again(opened: Open) -> None:
    page = opened(long_report(12)).page
    box, scale = (
        page.locator("#memory .u-over").bounding_box(),
        "() => document.getElementById('memory').chart.scales.x.max",
    )
    whole = page.evaluate(scale)
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 50, steps=4)
    page.mouse.up()
    page.wait_for_function(f"{scale} < 0.5 * {whole}".replace("() => ", ""))
    page.locator("#step").focus()
    page.keyboard.press("0")
    page.wait_for_function(f"{scale} === {whole}".replace("() => ", ""))


def test_the_axis_of_bytes_is_as_high_as_what_is_shown(opened: Open) -> None:
    report = long_report(12)
    page = opened(report).page
    page.locator("#step").focus()
    page.keyboard.press("Home")
    whole = page.evaluate(LINE)["max"]
    for _ in range(5):
        page.keyboard.press("+")
    assert page.evaluate(LINE)["max"] < 0.8 * whole >= 0.8 * report.peak


def test_lives_are_bars_on_the_axis_and_open_their_stories(opened: Open) -> None:
    report = long_report(12)
    forecast = report.forecast
    page = opened(report)
    page.page.locator("#step").focus()
    page.page.keyboard.press("Home")
    op = forecast.trace.index["mm_4"] + 1
    for _ in range(op):
        page.page.keyboard.press("ArrowRight")
    rows = page.page.locator("#lives li")
    assert rows.count() == min(12, sum(life.nbytes > 0 for life in forecast.live_at(op)))
    bar = page.page.locator("#lives button[aria-label*='offload']").first
    first, last = map(int, re.findall(r"op (\d+) to (\d+)", bar.get_attribute("aria-label"))[0])
    over, box = page.page.locator("#memory .u-over").bounding_box(), bar.bounding_box()
    per_op = over["width"] / len(forecast.trace.ops)
    assert box["x"] == pytest.approx(over["x"] + (first - 1) * per_op, abs=1.5)
    assert box["width"] == pytest.approx((last - first + 1) * per_op, abs=1.5)
    again = bar.locator("xpath=..").locator("button")
    assert again.count() == 2 and bar.locator("xpath=..").locator("hr").count() == 1  # it goes, and comes back
    again.nth(1).click()
    assert "offload: " in page.text("#story")


def test_layers_are_one_row_that_lists_them(opened: Open) -> None:
    page = opened(long_report(12))
    row = page.page.locator("#live button", has_text=" x, ").first
    title, count = row.locator(".what").inner_text(), int(row.locator(".bytes").inner_text().split(" x, ")[0])
    assert "*" in title and count > 1
    row.click()
    assert page.text("#story h3") == f"{count} buffers: {title}"
    assert page.page.locator("#story .rows button").count() == count
    page.page.locator("#story .rows button").first.click()
    assert page.text("#story h3").startswith("Buffer ") and page.page.locator(".life").is_visible()


def test_modules_have_the_bytes_of_all_that_is_in_them(opened: Open) -> None:
    report = long_report(12)
    page = opened(report)
    page.page.select_option("#which", "Modules at this op")
    trace = report.forecast.trace
    live = [life for life in report.forecast.live_at(report.forecast.peak_index) if life.nbytes]
    named = [life for life in live if trace.op[life.producer].where.startswith("blocks.3.")]
    page.page.fill("#filter", "blocks.3")
    rows = [row.split("\t") for row in page.texts("#table tbody tr")]
    whole = next(row for row in rows if row[0] == "blocks.3")
    assert int(whole[2]) == len(named)
    page.page.get_by_role("button", name="blocks.3", exact=True).click()
    assert page.page.locator("#which").input_value() == "Buffers at this op"
    assert page.page.locator("#table tbody tr").count() == len(named)


def test_a_wide_screen_is_filled(opened: Open) -> None:
    page = opened(long_report(12)).page
    page.set_viewport_size({"width": 2200, "height": 1000})
    page.wait_for_timeout(200)
    assert page.locator("#memory .u-over").bounding_box()["width"] > 1400
    aside = page.locator("aside").bounding_box()
    assert aside["x"] + aside["width"] > 2150


@pytest.mark.long
@pytest.mark.parametrize(
    ("value", "verb", "others"),
    [
        ("gelu_3", "recompute", ["offload (next best)", "keep"]),
        ("mm_4", "offload", ["recompute (next best)", "keep"]),
        ("gelu_5", "keep", ["recompute (next best)", "offload"]),
    ],
)
def test_the_story_of_a_buffer_has_its_decision_and_the_price_of_the_others(
    opened: Open, value: str, verb: str, others: list[str]
) -> None:
    report = long_report(12)
    page = opened(report)
    page.page.locator("#step").focus()
    page.page.keyboard.press("Home")
    for _ in range(report.forecast.trace.index[value]):
        page.page.keyboard.press("ArrowRight")
    page.page.select_option("#which", "Buffers at this op")
    page.page.get_by_role("button", name=value, exact=True).click()
    life = next(life for life in report.forecast.lifetimes if life.storage == value)
    story = page.text("#story")
    assert f"op {life.first + 1} to {life.last + 1} of {len(report.forecast.trace.ops)}" in story
    assert re.search(rf"^{verb}: ", story, re.MULTILINE)
    assert [line.partition(":")[0] for line in page.texts("#story li")] == others
    assert page.page.locator(".life").is_visible()


def test_the_filter_leaves_the_rows_with_all_of_its_words(opened: Open) -> None:
    page = opened(long_report(12))
    everything = page.page.locator("#table tbody tr").count()
    page.page.fill("#filter", "Recompute blocks.3")
    rows = page.texts("#table tbody tr")
    assert len(rows) == 1 < everything and "recompute" in rows[0] and "blocks.3.mlp.1" in rows[0]
    assert page.text("#found") == f"1 to 1 of 1 rows, {everything} without the filter"
    page.page.fill("#filter", "no such thing")
    assert page.page.locator("#table tbody tr").count() == 0 and page.text("#found").startswith("no rows")


def test_the_tables_have_every_op(opened: Open) -> None:
    report = long_report(40)
    ops, page = report.forecast.trace.ops, opened(report)
    page.page.select_option("#which", "Ops")
    seen = page.texts("#table tbody td:nth-child(2)")
    while page.page.locator("#after").is_enabled():
        page.page.click("#after")
        seen += page.texts("#table tbody td:nth-child(2)")
    assert seen == [op.name for op in ops]


def test_a_module_named_as_a_tag_is_shown_and_does_not_run(opened: Open) -> None:
    page = opened(long_report(12, EVIL))
    page.page.locator("#live button").first.click()
    page.page.hover("#memory .u-over")
    for name in page.page.locator("#which option").all_inner_texts():
        page.page.select_option("#which", name)
    page.page.select_option("#which", "Ops")
    page.page.fill("#filter", "mm_3 ")
    assert EVIL.format(3) in page.text("#table tbody")
    assert page.page.title() != "ran" and page.page.locator("img").count() == 0 and page.errors == []


def test_the_slider_shows_the_plan_of_each_budget(opened: Open) -> None:
    reports = [long_report(12), long_report(6), long_report(9)]
    page = opened(reports[0], sweep=reports)
    slider = page.page.locator("#budget")
    slider.focus()
    for key, report in [("Home", reports[1]), ("ArrowRight", reports[2]), ("ArrowRight", reports[0])]:
        page.page.keyboard.press(key)
        assert page.text("#verdict") == str(report).split("\n")[0]
        assert f"of {len(report.forecast.trace.ops)}: " in page.text("#op-title")
        assert page.text("#found").endswith(f"of {len({each.value for each in report.plan})} rows")


def test_the_slider_of_a_sweep_moves_the_figures(opened: Open) -> None:
    report = long_report(12)
    point = Point(report.budget // 2, report.peak // 2, 9e3, 0.5, 8e3, 0.125, 0.25, 0.5, 0.25, 77)
    refused = Point(report.budget // 4, report.peak // 3, float("inf"), float("inf"), 8e3, float("inf"))
    page = opened(report, sweep=Sweep((point, refused), point.budget, report.peak, 7e3))
    page.page.locator("#budget").focus()
    page.page.keyboard.press("ArrowLeft")
    figures = page.text("#figures")
    assert all(text in figures for text in (f"{point.peak / 1e6:.1f} MB", "9.0 ms", "8.0 ms", "77"))
    page.page.keyboard.press("ArrowLeft")
    assert page.text("#verdict").endswith("does not fit") and page.errors == []


def test_a_plan_beside_is_compared_by_decision(opened: Open) -> None:
    here, there = long_report(12), long_report(9)
    page = opened(here, beside=there)
    assert any("the plan beside" in line for line in page.texts("#lines li"))
    page.page.select_option("#which", "Differences")
    differ = {each.value for each in here.plan} - {each.value for each in there.plan}
    assert set(page.texts("#table tbody td:first-child")) == differ
    assert set(page.texts("#table tbody td:nth-child(3)")) == {"keep"}


def test_the_schemes_have_their_own_colours(opened: Open) -> None:
    def ground(scheme: str) -> Any:
        page = opened(long_report(6), scheme).page
        return page.evaluate("() => getComputedStyle(document.body).backgroundColor"), page.evaluate(PIXEL, [400, 300])

    (light, light_area), (dark, dark_area) = ground("light"), ground("dark")
    assert light != dark and light_area != dark_area


@pytest.mark.long
def test_a_real_plan_has_a_page(opened: Open) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(512, 64)
    as_it_is = memgraph.plan(model, x, offload=None).peak
    report = memgraph.plan(model, x, budget=int(as_it_is * 0.8), offload=None)
    page = opened(report, sweep=memgraph.sweep(model, x, offload=None))
    assert report.plan and page.errors == []
    assert page.text("#verdict") == str(report).split("\n")[0]
    verbs = page.texts("#table tbody td:first-child")
    assert verbs and set(verbs) == {"recompute"}
    page.page.click("#peak")
    op = report.forecast.trace.ops[report.forecast.peak_index]
    assert op.name in page.text("#said") and f"{report.peak / 1e6:.1f} MB on the device" in page.text("#said")


@pytest.mark.long
def test_a_measured_time_is_said_to_end_with_backward(opened: Open) -> None:
    page = opened(replace(long_report(12), measured_us=4567.0))
    assert "4.6 ms\nto the end of backward" in page.text("#figures")
    page.page.check("input[value=time]")
    assert "measured end of backward 4.6 ms" in page.texts("#lines li")
    assert page.page.evaluate("() => document.getElementById('memory').chart.scales.x.max") >= 4567.0

"""The table against peers is kept for each machine, read back, compared in words, and drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.nets import GPT, Size, checkpointed, plainly
from benchmarks.peers.__main__ import beside
from benchmarks.peers.history import History, Kept, changes
from benchmarks.peers.models import LSTM, MODELS, Model, loss_of, tokens
from benchmarks.peers.plot import FIELDS, svg
from benchmarks.peers.row import Ratio, Row, table
from benchmarks.peers.steps import SMALL, WAYS, load, save
from tests.support.allocator_meter import compiler
from tests.support.chromium import browser

ABOUT = {"date": "2026-11-24T10:00:00+00:00", "commit": "abc12345", "command": "python -m benchmarks.peers",
         "machine": "Linux x86_64, 2 cores, AMD EPYC", "load": 0.4, "torch": "2.13.0+cpu", "setting": "threads: 1"}  # fmt: skip
LATER = {**ABOUT, "date": "2026-11-25T10:00:00+00:00", "commit": "def67890", "load": 2.9}
ROW = Row("gpt", "checkpoint", 137_000_000, 61_300_000, 910.5, Ratio(1.28, 1.31, 1.35), 61_200_000,
          Ratio(0.85, 0.87, 0.89), Ratio(1.1, 1.14, 1.2))  # fmt: skip
REFUSED = Row("gpt", "compile", 137_000_000, why="LoweringError: no compiler")
SVG = "{http://www.w3.org/2000/svg}"


def kept(*runs: tuple[dict[str, Any], Sequence[Row]]) -> list[Kept]:
    return [Kept(about, row) for about, rows in runs for row in rows]


def test_rows_of_two_runs_are_read_back_in_order(tmp_path: Path) -> None:
    History(ABOUT, tmp_path).append([ROW, REFUSED])
    History(LATER, tmp_path).append([ROW])
    assert History(LATER, tmp_path).read() == kept((ABOUT, [ROW, REFUSED]), (LATER, [ROW]))


def test_each_machine_and_each_torch_has_a_file_of_its_own(tmp_path: Path) -> None:
    others = [{**ABOUT, "torch": "2.14.0+cpu"}, {**ABOUT, "machine": "Linux x86_64, 8 cores, AMD EPYC"}]
    paths = [History(about, tmp_path).path for about in (ABOUT, *others)]
    assert len(set(paths)) == 3
    assert paths[0].name == "linux-x86-64-2-cores-amd-epyc-torch-2-13-0-cpu.jsonl"


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    history = History(ABOUT, tmp_path)
    history.append([ROW])
    history.path.write_text(history.path.read_text() + '{"date": "2026\n')
    with pytest.raises(ValueError, match=r"cpu\.jsonl:2: expected a row .* delete the line"):
        history.read()


def test_a_slower_step_is_said_in_words() -> None:
    slower = replace(ROW, over_peer=Ratio(0.93, 0.95, 0.96))
    assert changes(kept((ABOUT, [ROW]), (LATER, [slower]))) == [
        "gpt beside checkpoint: memgraph takes 0.950 (0.930-0.960) of checkpoint's time, 0.870 (0.850-0.890) on "
        "2026-11-24 at abc12345, load 0.4: slower, beyond the spread of both",
        "of 3 ratios 1 changed beyond the spread since 2026-11-24 at abc12345, load 0.4",
    ]


def test_a_faster_step_is_said_in_words() -> None:
    faster = replace(ROW, over_eager=Ratio(1.1, 1.12, 1.15))
    first, _ = changes(kept((ABOUT, [ROW]), (LATER, [faster])))
    assert first.startswith("gpt beside checkpoint: checkpoint takes 1.120 (1.100-1.150) of eager's time")
    assert first.endswith("faster, beyond the spread of both")


def test_a_change_within_the_spread_is_none() -> None:
    near = replace(ROW, over_peer=Ratio(0.89, 0.92, 0.95))
    last = "of 3 ratios none changed beyond the spread since 2026-11-24 at abc12345, load 0.4"
    assert changes(kept((ABOUT, [ROW]), (LATER, [near]))) == [last]


def test_any_change_of_a_peer_s_peak_is_said() -> None:
    first, last = changes(kept((ABOUT, [ROW]), (LATER, [replace(ROW, peak=61_300_004, ours=61_200_004)])))
    was = "61300000 bytes on 2026-11-24 at abc12345, load 0.4"
    assert first == f"gpt beside checkpoint: the peak of checkpoint is 61300004 bytes, {was}"
    assert last.startswith("of 3 ratios none changed")


def test_a_peak_above_the_budget_is_said_at_the_first_run_too() -> None:
    over = replace(ROW, ours=61_300_004)
    said = "gpt beside checkpoint: memgraph took 61300004 bytes of 61300000"
    assert changes(kept((ABOUT, [over])))[0] == changes(kept((ABOUT, [ROW]), (LATER, [over])))[0] == said


def test_the_latest_earlier_run_of_the_same_setting_is_compared_with() -> None:
    oldest = {**ABOUT, "date": "2026-11-20T10:00:00+00:00"}
    two = {**ABOUT, "date": "2026-11-24T12:00:00+00:00", "setting": "threads: 2"}
    slow = replace(ROW, over_peer=Ratio(2.0, 2.1, 2.2))
    assert len(changes(kept((oldest, [slow]), (ABOUT, [ROW]), (two, [slow]), (LATER, [ROW])))) == 1
    assert "first run" in changes(kept((two, [ROW]), (LATER, [ROW])))[0]


def test_a_peer_that_is_new_or_did_not_run_is_no_change_of_time() -> None:
    said = changes(kept((ABOUT, [ROW]), (LATER, [replace(ROW, peer="other"), REFUSED, ROW])))
    assert said[:2] == ["gpt beside other: no earlier row", "gpt beside compile: no earlier row"]
    assert said[2:] == ["of 3 ratios none changed beyond the spread since 2026-11-24 at abc12345, load 0.4"]


def test_a_row_that_did_not_run_says_why_in_the_table() -> None:
    assert "LoweringError: no compiler" in list(table([ROW, REFUSED], "").columns[6].cells)


def runs() -> list[Kept]:
    """Return six runs of two models beside three peers, whose last ratios nearly coincide."""
    found = []
    for day in range(6):
        about = {**ABOUT, "date": f"2026-11-{10 + day}T10:00:00+00:00", "commit": f"{day}aaaaaaa"}
        for model in ("gpt", "llama"):
            for i, peer in enumerate(("eager", "checkpoint", "save_on_disk")):
                at = 0.8 + 0.01 * i + 0.02 * day
                found.append(
                    Kept(about, replace(ROW, model=model, peer=peer, over_peer=Ratio(at - 0.05, at, at + 0.05)))
                )
    return found


def test_the_plot_parses_and_has_its_labels() -> None:
    root = ElementTree.fromstring(svg(runs()))
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {f"{model}: {title}" for model in ("gpt", "llama") for title in FIELDS.values()} <= set(texts)
    assert [texts.count(peer) for peer in ("eager", "checkpoint", "save_on_disk")] == [4, 4, 4]
    assert texts.count("1") == 4 and texts.count("2026-11-15") == 4 and texts.count("5aaaaaaa") == 4
    assert len(list(root.iter(f"{SVG}polyline"))) == 12
    assert len(next(root.iter(f"{SVG}polyline")).attrib["points"].split()) == 6
    assert "threads: 1; runs: 6" in (root.findtext(f"{SVG}desc") or "")


def test_a_ratio_above_another_is_drawn_above_it() -> None:
    first = next(ElementTree.fromstring(svg(runs())).iter(f"{SVG}polyline"))
    heights = [float(point.partition(",")[2]) for point in first.attrib["points"].split()]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == 6  # ratios rise, and y falls


def test_other_settings_and_peers_that_did_not_run_are_not_drawn() -> None:
    two = {**ABOUT, "setting": "threads: 2"}
    root = ElementTree.fromstring(svg(kept((two, [ROW]), (LATER, [ROW, REFUSED]))))
    assert [len(line.attrib["points"].split()) for line in root.iter(f"{SVG}polyline")] == [1, 1]
    assert ElementTree.fromstring(svg([])) is not None


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_plot_is_readable_at_1280_pixels(tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "plot.svg"
    path.write_text(svg(runs()))
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
        page.goto(path.as_uri())
        boxes = page.evaluate(
            "[...document.querySelectorAll('text')].map(t => [t.textContent, ...Object.values(t.getBoundingClientRect().toJSON())])"
        )
        page_colour, ink = page.evaluate(
            "[getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.querySelector('text')).fill]"
        )
    assert all(left >= 0 and left + width <= 1280 for _, left, _, width, _, *_ in boxes)
    assert [
        (one[0], other[0]) for i, one in enumerate(boxes) for other in boxes[:i] if overlap(one[1:], other[1:])
    ] == []
    dark, light = sorted([page_colour, ink], key=brightness)
    assert (page_colour == dark) is (scheme == "dark") and brightness(light) - brightness(dark) > 500


def overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if two boxes have an area in common; a line's box is a little higher than its letters."""
    (x, y, width, height), (left, top, wide, high) = one[:4], other[:4]
    return x < left + wide and left < x + width and y < top + high - 4 and top < y + height - 4


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_hooks_that_save_to_disk_change_no_bit() -> None:
    torch.manual_seed(0)
    model = GPT(Size(1, 32, 2, vocabulary=64, context=64))
    batch = [torch.randint(64, (2, 64)) for _ in range(2)]
    eager = torch.autograd.grad(model(*batch), list(model.parameters()))
    files = []

    def noted(tensor: torch.Tensor) -> Any:
        files.append(tensor.numel() >= SMALL)
        return save(tensor)

    with saved_tensors_hooks(noted, load):
        loss = model(*batch)
    assert all(map(torch.equal, eager, torch.autograd.grad(loss, list(model.parameters())))) and any(files)


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_each_block_changes_no_bit_and_is_called(name: str) -> None:
    model, called = MODELS[name], []

    def through(block: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(block)
        return checkpointed(block, *args, **kwargs)

    gradients = []
    for way in (plainly, through):
        torch.manual_seed(0)
        module, batch = model.made(way), model.batch()
        loss_of(module(**{key: value[:1] for key, value in batch.items()})).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert len(called) >= 4
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True) if None not in pair)


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="the second meter wants a C compiler")
def test_a_run_counts_every_way_and_memgraph_stays_within_the_peak_beside_it() -> None:
    rows = beside("tiny", Model(partial(LSTM, 3, 64), partial(tokens, 8, 64), nn.LSTM), WAYS[:3], rounds=3, threads=1)
    assert [(row.model, row.peer, row.why) for row in rows] == [("tiny", way.name, "") for way in WAYS[:3]]
    eager, checkpoint, disk = (row.peak or 0 for row in rows)
    assert 0 < checkpoint < eager and 0 < disk < eager
    for row in rows:
        assert row.eager == eager and row.ours is not None and row.peak is not None and row.ours <= row.peak
        assert row.over_peer and bool(row.over_eager) == bool(row.ours_over_eager) == (row.peer != "eager")
        assert row.cpu_over_peer and row.forecast and row.forecast <= row.peak and row.forecast_ms and row.alone_ms
        assert (row.anonymous or 0) > 0 and (row.ours_anonymous or 0) > 0

"""Keep rows of each run on this machine, and say in words what changed since the latest earlier run.

    file = History(about)          # results/peers/linux-x86-64-2-cores-amd-epyc-torch-2-13-0-cpu.jsonl
    file.append(rows)              # a line of JSON for each row, with date, commit, command and load
    changes(file.read())           # ["gpt beside checkpoint: memgraph takes 0.95 of its time, 0.87 on ...: slower"]

A ratio has changed if the middle halves of both runs have no value in common.  The bytes of a peer are exact, so any
change is one.  Those of memgraph depend on measured times, and only have to stay within the peer's.  Runs are compared
if their settings are equal: model sizes, batch and threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import FOLDER, slug

from .row import Ratio, Row

RATIOS = {  # by the name of the field, in words
    "over_eager": "{peer} takes {now} of eager's time",
    "over_peer": "memgraph takes {now} of {peer}'s time",
    "ours_over_eager": "memgraph takes {now} of eager's time",
}


@dataclass(frozen=True)
class Kept:
    """A row of one run, with facts about that run: date, commit, command, machine, load, setting, versions."""

    about: Mapping[str, Any]
    row: Row

    @property
    def when(self) -> str:
        return f"{self.about['date'][:10]} at {self.about['commit']}, load {self.about['load']}"


class History:
    """The file of a machine: its processor, cores and version of torch are the name."""

    def __init__(self, about: Mapping[str, Any], folder: Path = FOLDER / "peers") -> None:
        name = slug(f"{about['machine']} torch {about['torch']}")
        self.path, self.about = folder / f"{name}.jsonl", about

    def append(self, rows: Sequence[Row]) -> None:
        """Add the rows of a run in one write, so that a run that is stopped adds none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write("".join(json.dumps({**self.about, "row": row.facts}) + "\n" for row in rows))

    def read(self) -> list[Kept]:
        """Return all rows, oldest first.

        Raises:
            ValueError: a line is not such a row.
        """
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        return [self._kept(number, line) for number, line in enumerate(lines, 1)]

    def _kept(self, number: int, line: str) -> Kept:
        try:
            about = json.loads(line)
            return Kept(about, Row.read(about.pop("row")))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{self.path}:{number}: expected a row of benchmarks.peers as JSON, found {line[:60]!r} ({error}); "
                "delete the line"
            ) from error


def changes(kept: Sequence[Kept]) -> list[str]:
    """Compare the rows of the last run with the latest earlier ones of the same setting, in words."""
    if not kept:
        return ["no run is kept"]
    run = [each for each in kept if each.about["date"] == kept[-1].about["date"]]
    pairs = [(earlier(kept, each), each) for each in run]
    compared = [(old, new) for old, new in pairs if old is not None]
    over = [
        f"{_named(each)}: memgraph took {each.row.ours} bytes of {each.row.peak}" for each in run if each.row.is_over
    ]
    if not compared:
        return [*over, "the first run on this machine with this setting: nothing to compare it with"]
    times = [line for old, new in compared for line in _ratios(old, new)]
    peaks = [line for old, new in compared for line in _peaks(old, new)]
    alone = [f"{new.row.model} beside {new.row.peer}: no earlier row" for old, new in pairs if old is None]
    count = sum(_both(old, new, name) is not None for old, new in compared for name in RATIOS)
    last = f"of {count} ratios {len(times) or 'none'} changed beyond the spread since {compared[0][0].when}"
    return [*over, *times, *peaks, *alone, last]


def earlier(kept: Sequence[Kept], now: Kept) -> Kept | None:
    """Return the latest row of an earlier run that may be compared with this one."""
    row, about = now.row, now.about
    same = (
        each for each in reversed(kept)
        if each.about["date"] < about["date"] and each.about["setting"] == about["setting"]
        and (each.row.model, each.row.peer) == (row.model, row.peer)
    )  # fmt: skip
    return next(same, None)


def _ratios(old: Kept, new: Kept) -> Iterator[str]:
    for name, sentence in RATIOS.items():
        both = _both(old, new, name)
        if both is not None and (word := _word(*both)):
            said = sentence.format(peer=new.row.peer, now=both[1])
            yield f"{_named(new)}: {said}, {both[0]} on {old.when}: {word}, beyond the spread of both"


def _peaks(old: Kept, new: Kept) -> Iterator[str]:
    before, now = old.row.peak, new.row.peak
    if before != now:
        yield f"{_named(new)}: the peak of {new.row.peer} is {_bytes(now)}, {_bytes(before)} on {old.when}"


def _named(kept: Kept) -> str:
    return f"{kept.row.model} beside {kept.row.peer}"


def _both(old: Kept, new: Kept, name: str) -> tuple[Ratio, Ratio] | None:
    before, now = getattr(old.row, name), getattr(new.row, name)
    return None if before is None or now is None else (before, now)


def _word(before: Ratio, now: Ratio) -> str:
    """Return how a ratio has changed; nothing if the middle halves touch."""
    return "slower" if now.low > before.high else "faster" if now.high < before.low else ""


def _bytes(nbytes: int | None) -> str:
    return "none" if nbytes is None else f"{nbytes} bytes"

"""Refuse what is given in place of a report, its text or its file, and say what to give.

report.to_html("plan.html", beside="yesterday.json")   ->   TypeError: beside is a str, 'yesterday.json'; give a
                                                            memgraph.Report: Report.from_json(text) reads a file's
"""

from __future__ import annotations

from os import PathLike, fsdecode
from pathlib import Path

from .report_data import ReportData

REPORT = "give a memgraph.Report: model.plan, what memgraph.plan returned, or Report.from_json(text) of a plan file"
TEXT = "give the text that Report.to_json() returned; of a file, Path(file).read_text()"
PATH = 'give the path of a file, as "plan.html"'


def require_report(name: str, given: object) -> None:
    """
    Raises:
        TypeError: an argument is no report.
    """
    if not isinstance(given, ReportData):
        raise TypeError(f"{name} is {_described(given)}; {REPORT}")


def require_text(given: object) -> None:
    """
    Raises:
        TypeError: a saved plan is no text.
    """
    if not isinstance(given, str):
        raise TypeError(f"the saved plan is {_described(given)}; {TEXT}")


def written_file(given: object) -> Path:
    """Return the path of a file that can be written.

    Raises:
        TypeError, ValueError: it is no path, or that of a folder.
        FileNotFoundError: its folder does not exist.
    """
    if not isinstance(given, str | PathLike):
        raise TypeError(f"path is {_described(given)}; {PATH}")
    path = Path(fsdecode(given))
    if not path.name or path.is_dir():
        raise ValueError(f"path={str(given)!r} is a folder; {PATH}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} can't be written: there is no folder {str(path.parent.absolute())!r}; make it")
    return path


def _described(given: object) -> str:
    """Return the type of a value, and the value if that is short."""
    if given is None:
        return "None"
    kind = type(given).__name__
    shown = f", {given!r:.60}" if isinstance(given, str | bytes | int | float) else ""
    return f"a {kind}{shown}"

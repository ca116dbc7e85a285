"""The log of the passes, and of all else that memgraph logs, as variables of the environment ask for it.

MEMGRAPH_DEBUG=1   captures and plans, on stderr (level INFO of the logger "memgraph")
MEMGRAPH_DEBUG=2   and a line for each pass: `optimize          39 decisions, 649216392 bytes at mm_7, 7090 us`
MEMGRAPH_DEBUG=3   and the decisions behind it
MEMGRAPH_PLANS=file  a line of JSON for each plan that is about to run, behind those that the file has
MEMGRAPH_DUMP=dir  dir/1234-0/00-captured.txt, 01-optimize.txt, ...: the step with the best plan behind each pass
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from passes import PlanResult

from .user_warning import warn_user

DEBUG, DUMP, PLANS = "MEMGRAPH_DEBUG", "MEMGRAPH_DUMP", "MEMGRAPH_PLANS"
LEVELS = {"1": logging.INFO, "2": logging.DEBUG, "3": logging.DEBUG - 1}
LOG = logging.getLogger(__name__)
_searches = itertools.count()


def note_plan(facts: Callable[[], dict[str, object]]) -> None:
    """Write a line of JSON for a plan to the file of the variable, if it is set; warn if that can't be written."""
    if not (path := os.environ.get(PLANS, "")):
        return
    line = json.dumps({"time": round(time.time(), 3), "process": os.getpid(), **facts()}) + "\n"
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)  # at once, so that lines of several processes are whole
    except OSError as error:
        warn_user(f"{PLANS}={path!r} can't be written: {error.strerror}; plans are not noted")


def show_log() -> None:
    """Write the logger "memgraph" to stderr if the variable is set; warn if it has another value."""
    given = os.environ.get(DEBUG, "")
    if given in ("", "0"):
        return
    if given not in LEVELS:
        warn_user(f"{DEBUG}={given!r} means nothing: 1 shows captures and plans, 2 each pass, 3 each decision")
        return
    logger, handler = logging.getLogger("memgraph"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("memgraph: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(LEVELS[given])


class PassLog:
    """Called behind each pass of one search: counts it, logs it, and writes it if that is asked for."""

    def __init__(self, done: Callable[[PlanResult], None]) -> None:
        self._done = done
        self._count = 0
        named = os.environ.get(DUMP)
        self._folder = Path(named) / f"{os.getpid()}-{next(_searches)}" if named else None

    def __call__(self, name: str, best: PlanResult) -> None:
        """Note the best plan behind the pass `name`."""
        if self._count:
            self._done(best)
        LOG.debug("%-24s %d decisions, %s", name, len(best.plan), best.forecast)
        if LOG.isEnabledFor(logging.DEBUG - 1):
            for decision in best.plan:
                LOG.log(logging.DEBUG - 1, "%s", decision)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{self._count:02d}-{name}.txt").write_text(str(best.forecast.trace))
        self._count += 1


show_log()  # before anything is logged

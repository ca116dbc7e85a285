"""Warnings name the user's line, and the log tells when a step is planned."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import memgraph
from tests.support.compare import ROOM

INSIDE = "from memgraph.system.user_warning import warn_user\ndef deep():\n    warn_user('the folder is full of air')\n"


def test_a_warning_names_the_users_line_and_comes_once_for_it() -> None:
    inside: dict[str, object] = {}
    exec(compile(INSIDE, str(Path(memgraph.__file__).with_name("deep.py")), "exec"), inside)
    deep = inside["deep"]
    assert callable(deep)
    with pytest.warns(RuntimeWarning, match="full of air") as said:
        deep()
    assert [warning.filename for warning in said] == [__file__]


def test_the_log_says_when_something_is_planned_and_when_nothing_is(caplog: pytest.LogCaptureFixture) -> None:
    compiled = memgraph.compile(nn.Linear(4, 4), ROOM)
    with caplog.at_level(logging.INFO, "memgraph"):
        for rows in (2, 2, 3, 2):
            compiled(torch.ones(rows, 4)).sum().backward()
            compiled.zero_grad()
    steps = [record.getMessage() for record in caplog.records if record.name == "memgraph.api.kept_steps"]
    said = [message.partition(" in ")[0] for message in steps]  # without lines of progress on a busy machine
    assert said == [
        "the first call is captured, priced and planned", "planned",
        "this call is captured, priced and planned, as no earlier one was like it (capture 2): input is float32 3 x 4 on "
        "cpu, and was float32 2 x 4 on cpu", "planned",
    ]  # fmt: skip

"""Whose code an exception comes from: the user's, torch's or memgraph's, and which of the model's modules was running.

source_line(error.__traceback__)             ->   /home/me/model.py:12 in forward
module_running(error.__traceback__, model)   ->   "layers.0.mlp", that module
"""

from __future__ import annotations

import os
from pathlib import Path
from traceback import walk_tb
from types import CodeType, TracebackType

import torch
from torch import nn

TORCH = str(Path(torch.__file__).parent) + os.sep
MEMGRAPH = str(Path(__file__).parents[1]) + os.sep


def source_line(traceback: TracebackType | None) -> str:
    """Where in the user's code an exception arose, or else in torch's own modules, as `path:line in function`."""
    places = [(frame.f_code, line) for frame, line in walk_tb(traceback)]
    users = [place for place in places if is_users_code(place[0])]
    modules = [place for place in places if place[0].co_name == "forward"]
    for code, line in reversed(users or modules):
        return f"{code.co_filename}:{line} in {code.co_name}"
    return "an unknown line"


def module_running(traceback: TracebackType | None, whole: nn.Module) -> tuple[str, nn.Module] | None:
    """The innermost submodule in whose forward an exception arose, with its path; None if it was in none of them."""
    paths = {id(part): path for path, part in whole.named_modules()}
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(traceback) if frame.f_code.co_name == "forward"]
    for owner in reversed(owners):
        if isinstance(owner, nn.Module) and id(owner) in paths:
            return paths[id(owner)] or "the model", owner
    return None


def is_torchs(traceback: TracebackType | None) -> bool:
    """Whether an exception was raised by torch's own code."""
    frames = [frame for frame, _ in walk_tb(traceback)]
    return bool(frames) and frames[-1].f_code.co_filename.startswith(TORCH)


def is_users(traceback: TracebackType | None) -> bool:
    """Whether code of the user's had any part in an exception."""
    return any(is_users_code(frame.f_code) for frame, _ in walk_tb(traceback))


def is_users_code(code: CodeType) -> bool:
    """Whether it is neither torch's nor memgraph's, nor made while the program ran."""
    return not code.co_filename.startswith((TORCH, MEMGRAPH, "<"))

"""Find the user's line and the submodule behind an exception.

source_line(error.__traceback__)             ->   /home/me/model.py:12 in forward
module_running(error.__traceback__, model)   ->   "layers.0.mlp", the module
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
    """Return the line of the user's code that raised, or of a torch module, as `path:line in function`."""
    places = [(frame.f_code, line) for frame, line in walk_tb(traceback)]
    users = [place for place in places if is_users_code(place[0])]
    modules = [place for place in places if place[0].co_name == "forward"]
    for code, line in reversed(users or modules):
        return f"{code.co_filename}:{line} in {code.co_name}"
    return "an unknown line"


def module_running(traceback: TracebackType | None, whole: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the innermost submodule whose forward raised, with its path; None if no forward did."""
    paths = {id(module): path for path, module in whole.named_modules()}
    frames = (frame for frame, _ in walk_tb(traceback) if frame.f_code.co_name == "forward")
    owners = [frame.f_locals.get(first) for frame in frames for first in frame.f_code.co_varnames[:1]]
    for owner in reversed(owners):
        if isinstance(owner, nn.Module) and id(owner) in paths:
            return paths[id(owner)] or "the model", owner
    return None


def is_torchs(traceback: TracebackType | None) -> bool:
    """Return True if torch's own code raised the exception."""
    frames = [frame for frame, _ in walk_tb(traceback)]
    return bool(frames) and frames[-1].f_code.co_filename.startswith(TORCH)


def is_users(traceback: TracebackType | None) -> bool:
    """Return True if a frame of the traceback is the user's code."""
    return any(is_users_code(frame.f_code) for frame, _ in walk_tb(traceback))


def is_users_code(code: CodeType) -> bool:
    """Return True if the code is not torch's, memgraph's or generated."""
    return not code.co_filename.startswith((TORCH, MEMGRAPH, "<"))

"""Find the user's line and the submodule behind an exception, and the methods that are running.

source_line(error.__traceback__)             ->   /home/me/model.py:12 in forward
module_running(error.__traceback__, model)   ->   "layers.0.mlp", the module
is_inside("generate", model)                 ->   True while model.generate(ids) calls model(ids)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

_found = find_spec("torch")  # which commands that only read text do not import
TORCH = os.path.join(os.path.dirname(_found.origin or "") if _found is not None else "", "")
T = TypeVar("T")
NN = os.path.join(TORCH, "nn", "")
MEMGRAPH = str(Path(__file__).parents[1]) + os.sep


def source_line(traceback: TracebackType | None) -> str:
    """Return the line of the user's code that raised, or of a torch module, as `path:line in function`."""
    places = [(frame.f_code, line) for frame, line in walk_tb(traceback)]
    users = [place for place in places if is_users_code(place[0])]
    modules = [place for place in places if place[0].co_name == "forward" and place[0].co_filename.startswith(NN)]
    for code, line in reversed(users or modules):
        return f"{code.co_filename}:{line} in {code.co_name}"
    return "an unknown line"


def module_running(traceback: TracebackType | None, whole: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the innermost submodule whose forward raised, with its path; None if no forward did."""
    paths = {id(module): path for path, module in whole.named_modules()}
    frames = (frame for frame, _ in walk_tb(traceback))
    for owner in reversed(list(_modules_in("forward", frames))):
        if id(owner) in paths:
            return paths[id(owner)] or "the model", owner
    return None


def is_running(function: str) -> bool:
    """Return True if a function of this name is running in this thread."""
    return any(frame.f_code.co_name == function for frame, _ in walk_stack(sys._getframe()))


def is_inside(method: str, module: nn.Module) -> bool:
    """Return True if a method of this name is running, of `module` or of a module around it."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    return any(module in owner.modules() for owner in _modules_in(method, frames))


def running(kind: type[T]) -> T | None:
    """Return the innermost object of a class whose method is running in this thread."""
    owners = (_owner(frame) for frame, _ in walk_stack(sys._getframe()))
    return next((owner for owner in owners if isinstance(owner, kind)), None)


def _modules_in(method: str, frames: Iterable[FrameType]) -> Iterator[nn.Module]:
    """Return the modules whose method of this name runs in a frame, in the order of the frames."""
    from torch import nn

    owners = (_owner(frame) for frame in frames if frame.f_code.co_name == method)
    return (owner for owner in owners if isinstance(owner, nn.Module))


def _owner(frame: FrameType) -> Any:
    """Return the first argument of the function that runs in a frame."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None


def is_torchs(traceback: TracebackType | None) -> bool:
    """Return True if torch's own code raised the exception."""
    frames = [frame for frame, _ in walk_tb(traceback)]
    return bool(frames) and frames[-1].f_code.co_filename.startswith(TORCH)


def is_refused_argument(error: Exception) -> bool:
    """Return True if a function or a module of torch.nn has refused its arguments, as it does in eager."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    is_nn = bool(frames) and frames[-1].f_code.co_filename.startswith(NN)
    return is_nn and isinstance(error, ValueError | TypeError | IndexError)


def is_users(traceback: TracebackType | None) -> bool:
    """Return True if a frame of the traceback is the user's code."""
    return any(is_users_code(frame.f_code) for frame, _ in walk_tb(traceback))


def is_users_code(code: CodeType) -> bool:
    """Return True if the code is not torch's, memgraph's or generated."""
    return not code.co_filename.startswith((TORCH, MEMGRAPH, "<"))

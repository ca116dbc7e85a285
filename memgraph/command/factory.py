"""The model that a command line names, as a function of a file or a module.

    train.py:setup         def setup(): return {"model": model, "args": (x,), "optimizer": optimizer, "loss": None}
    my.package:make_model  def make_model(): return model, x

A factory returns a dict, or the module followed by the arguments of its call.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from torch import nn

from ..fit.described_model import ModelCall

KEYS = ("model", "args", "kwargs", "optimizer", "loss")
FORMS = (
    "return a dict with model, args, kwargs, optimizer and loss (all but model may be left out), or (model, *arguments)"
)


def load_call(target: str) -> ModelCall:
    """Import a file or a module and call the factory in it.

    Args:
        target: `FILE:FACTORY` or `MODULE:FACTORY`.

    Raises:
        typer.BadParameter: there is no such file, module or factory, or it returns something else.
    """
    return made_call(load_factory(target)(), target)


def load_factory(target: str) -> Callable[..., Any]:
    """Import a file or a module, and return the factory in it; errors as in `load_call`."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise typer.BadParameter(f"{target!r} names no factory: write FILE:FACTORY, as in train.py:setup")
    found = getattr(_module(where), name, None)
    if not callable(found):
        raise typer.BadParameter(f"{where} has no function {name!r}: define one; {FORMS}")
    factory: Callable[..., Any] = found
    return factory


def made_call(made: Any, target: str) -> ModelCall:
    """Return the call that a factory has made; `target` names it in an error."""
    if isinstance(made, nn.Module):
        return ModelCall(made)
    if isinstance(made, Sequence) and made and isinstance(made[0], nn.Module):
        return ModelCall(made[0], tuple(made[1:]))
    if isinstance(made, Mapping) and isinstance(made.get("model"), nn.Module):
        if unknown := set(made) - set(KEYS):
            raise typer.BadParameter(f"{target} returned unknown {', '.join(sorted(map(str, unknown)))}; {FORMS}")
        args = made.get("args", ())
        given = {**made, "args": tuple(args) if isinstance(args, list | tuple) else (args,)}
        return ModelCall(**given)
    raise typer.BadParameter(f"{target} returned {type(made).__name__}, which has no module: {FORMS}")


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name and where.startswith(error.name):
                raise typer.BadParameter(f"there is no module {where!r}: {error}") from error
            raise
    path = Path(where)
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {where!r} in {Path.cwd()}")
    sys.path.insert(0, str(path.parent.resolve()))  # as `python train.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look classes up there
    spec.loader.exec_module(module)
    return module

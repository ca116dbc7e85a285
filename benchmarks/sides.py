"""An object in a process of its own, so that two can be run in turn and neither sees what the other does to a process.

    with Side(Training, shape, budget) as ours:
        ours.do("step", 3)      # Training(shape, budget).step(3), there

What a plan asks of the allocator, for one, holds for a whole process, and eager is to run without.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self


class Side:
    """A proxy of `make(*args)`, which is made and called in a process of its own."""

    def __init__(self, make: Callable[..., object], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make, args), daemon=True)
        self._process.start()
        there.close()
        self._answer()

    def do(self, method: str, *args: Any) -> Any:
        """The result of a method.

        Raises:
            Exception: what the method raised.
            EOFError: the process has ended.
        """
        self._here.send((method, args))
        return self._answer()

    def _answer(self) -> Any:
        result, error = self._here.recv()
        if error is not None:
            raise error
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._here.close()  # which ends the other process where it waits
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Connection, make: Callable[..., object], args: tuple[Any, ...]) -> None:
    served: object = None
    try:
        served = make(*args)
        pipe.send((None, None))
        while True:
            method, given = pipe.recv()
            try:
                pipe.send((getattr(served, method)(*given), None))
            except Exception as error:
                pipe.send((None, error))
    except EOFError:
        return
    except Exception as error:
        pipe.send((None, error))

"""Run an object in its own process, so that two can run in turn without changing each other's process.

    with Side(Training, shape, budget) as ours:
        ours.do("step", 3)      # Training(shape, budget).step(3), there

For example, a plan sets options of the allocator for the whole process, and eager must run without them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self


class Side:
    """A proxy of `make(*args)`, which is made and called in its own process."""

    def __init__(self, make: Callable[..., object], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make, args), daemon=True)
        self._process.start()
        there.close()
        self._answer()

    def do(self, method: str, *args: Any) -> Any:
        """Call a method, and return its result.

        Raises:
            Exception: what the method raised.
            EOFError: the process has ended.
        """
        self._here.send((method, args))
        return self._answer()

    @property
    def process(self) -> int:
        """The number of its process."""
        assert self._process.pid is not None
        return self._process.pid

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
        self._here.close()  # the other process waits for it, and ends
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

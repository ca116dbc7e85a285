"""State of the process, and state that forward changes itself."""

from __future__ import annotations

import configparser
import contextvars
import itertools
import logging
import os
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .way import Settings, of, prepared

SETTINGS = Settings()
TABLE = {"a": 2}
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=2)
LOCAL = threading.local()
POOL, EVENT, CONFIG = ThreadPoolExecutor(1), threading.Event(), configparser.ConfigParser()
WEAK: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@of("process")
def _() -> Any:
    """`os.environ[...]`"""
    os.environ["A_WAY"] = "2"
    return lambda m, x: x * int(os.environ["A_WAY"]), lambda: os.environ.update(A_WAY="3")


@of("process")
def _() -> Any:
    """`os.environ.get`"""
    os.environ.pop("A_WAY", None)
    return lambda m, x: x * int(os.environ.get("A_WAY", "1")), lambda: os.environ.update(A_WAY="3")


@of("process")
def _() -> Any:
    """`os.getenv`"""
    os.environ["A_WAY"] = "2"
    return lambda m, x: x * int(os.getenv("A_WAY", "1")), lambda: os.environ.update(A_WAY="3")


@of("process")
def _() -> Any:
    """`os.getenvb`"""
    os.environ["A_WAY"] = "2"
    return lambda m, x: x * int(os.getenvb(b"A_WAY", b"1")), lambda: os.environ.update(A_WAY="3")


@of("process")
def _() -> Any:
    """`os.path.expanduser`"""
    home = os.environ.get("HOME", "/")
    os.environ["HOME"] = "/a"

    def change() -> Any:
        os.environ["HOME"] = "/longer"
        return lambda: os.environ.update(HOME=home)

    return lambda m, x: x * len(os.path.expanduser("~")), change


@of("process")
def _() -> Any:
    """a global that a function in another thread reads"""
    TABLE["a"] = 2
    return lambda m, x: x * POOL.submit(lambda: TABLE["a"]).result(), lambda: TABLE.update(a=3)


@of("process")
def _() -> Any:
    """a `threading.Event`"""
    EVENT.clear()
    return lambda m, x: x * (3 if EVENT.is_set() else 2), EVENT.set


@of("process")
def _() -> Any:
    """a `ConfigParser`"""
    CONFIG["a"] = {"scale": "2"}
    return lambda m, x: x * CONFIG.getint("a", "scale"), lambda: CONFIG.set("a", "scale", "3")


@of("process")
def _() -> Any:
    """the level of `logging.getLogger(name)`"""
    logging.getLogger("ways").setLevel(20)
    return lambda m, x: x * (2 if logging.getLogger("ways").isEnabledFor(10) else 1), lambda: logging.getLogger(
        "ways"
    ).setLevel(10)


@of("process")
def _() -> Any:
    """a `ContextVar`"""
    CONTEXT.set(2)
    return lambda m, x: x * CONTEXT.get(), lambda: [CONTEXT.set(3)]


@of("process")
def _() -> Any:
    """a `threading.local`"""
    LOCAL.by = 2
    return lambda m, x: x * LOCAL.by, lambda: setattr(LOCAL, "by", 3)


@of("process")
def _() -> Any:
    """a `WeakKeyDictionary`"""
    WEAK[SETTINGS] = 2
    return lambda m, x: x * WEAK[SETTINGS], lambda: WEAK.update({SETTINGS: 3})


@of("process")
def _() -> Any:
    """a random number of `random`"""
    random.seed(0)
    return lambda m, x: x * 1.0 if random.random() < 2 else x, lambda: random.seed(1)


@of("process")
def _() -> Any:
    """the clock"""
    begin = time.time()
    return lambda m, x: x * (1.0 if time.time() >= begin else 2.0), lambda: None


@of("process")
def _() -> Any:
    """an iterator"""
    held = itertools.count(1)
    return lambda m, x: x * next(held), lambda: None


@of("process")
def _() -> Any:
    """an iterator in an attribute"""
    return prepared(lambda m, x: x * next(m.held), lambda m: setattr(m, "held", itertools.count(1))), lambda: None


@of("process")
def _() -> Any:
    """a counter in an attribute that forward reads"""

    def then(m: Any, x: Tensor) -> Tensor:
        m.held += 1
        return x * m.held

    return prepared(then, lambda m: setattr(m, "held", 0)), lambda: None


@of("process")
def _() -> Any:
    """a counter in a global that forward reads"""

    def then(m: Any, x: Tensor) -> Tensor:
        TABLE["a"] += 1
        return x * TABLE["a"]

    return then, lambda: None


@of("process")
def _() -> Any:
    """a tensor that forward keeps for its next call"""

    def then(m: Any, x: Tensor) -> Tensor:
        before, m.held = m.held, x.detach()
        return x + before

    return prepared(then, lambda m: setattr(m, "held", torch.zeros(4, 8))), lambda: None


@of("process")
def _() -> Any:
    """an attribute of a logger"""
    logger: Any = logging.getLogger("a_logger_of_a_way")
    vars(logger).pop("factor", None)
    return lambda m, x: x * getattr(logger, "factor", 2), lambda: setattr(logger, "factor", 3)

"""A step that evaluates its closure as often as it likes (LBFGS): one rank steps, and tells the others when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .optimizer import OSS


def drive(optimizer: OSS, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
    """Step."""
    raise NotImplementedError

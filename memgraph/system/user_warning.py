"""Warn at the user's own line, once for each line.

warn_user("...")   ->   /home/me/train.py:31: RuntimeWarning: ...
"""

from __future__ import annotations

import inspect
import warnings

from .frames import is_users_code


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither torch's nor memgraph's."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None and not is_users_code(frame.f_code):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)

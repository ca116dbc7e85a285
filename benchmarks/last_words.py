"""The line that says why a Python process has failed, of all that it wrote to stderr.

Before: torch.AcceleratorError: CUDA error: operation not supported, and then a line on where its name is explained
After:  torch.AcceleratorError: CUDA error: operation not supported
"""

from __future__ import annotations

import re

BEGIN = "Traceback (most recent call last):"
IGNORED = re.compile("Exception ignored|Exception in thread")  # before a traceback that did not end the process
CPLUSPLUS = "  what():"
FATAL = "Fatal Python error: "


def last_words(text: str) -> str:
    """Return the type and message of the exception that ended a process; the last line of other text."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for i in reversed(range(len(lines))):
        if lines[i].startswith(CPLUSPLUS):
            return lines[i].removeprefix(CPLUSPLUS).strip()
        if lines[i] == BEGIN and not (i and IGNORED.match(lines[i - 1])):
            rest = [line for line in lines[i + 1 :] if not line.startswith(" ")]
            return " ".join(rest[: 2 if rest and rest[0].endswith(":") else 1])  # some messages begin on the next line
    fatal = [line for line in lines if line.startswith(FATAL)]  # faulthandler's, with all threads and modules behind it
    return (fatal or lines or [""])[-1].strip()

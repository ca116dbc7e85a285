"""Read the most anonymous memory that another process had, from the system: the kernel keeps it.

water = HighWater(process)
water.reset()
...                         # steps of that process
water.anonymous_nbytes      # 93_200_384: at most, since the reset
"""

from __future__ import annotations

from pathlib import Path


class HighWater:
    """The most resident memory of a process since a reset, less what is backed by files."""

    def __init__(self, process: int) -> None:
        self._folder = Path(f"/proc/{process}")

    def reset(self) -> None:
        """Begin again, with the memory of now."""
        (self._folder / "clear_refs").write_text("5")

    @property
    def anonymous_nbytes(self) -> int:
        """The bytes; pages of files and of shared memory count as they are now."""
        lines = (line.split() for line in (self._folder / "status").read_text().splitlines())
        found = {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if line[0].startswith(("VmHWM", "Rss"))}
        return found["VmHWM"] - found["RssFile"] - found["RssShmem"]

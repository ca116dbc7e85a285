"""The answer of a fit: the report of the plan, the model and the device in a line, and what is not counted.

print(printed(FitResult(...)))   ->   LlamaForCausalLM of llama, 6738.4M parameters, bfloat16; batch 1, 2048 tokens;
                                      NVIDIA H200 SXM
                                      largest batch: 4; 5 needs 24.6 GB
                                      fits: forecast 23.1 GB ...
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..report.report import Report
from ..report.tables import mb, stacked
from .device_profile import DeviceProfile
from .largest import FARTHEST, Largest

if TYPE_CHECKING:
    from rich.console import RenderableType

COUNTED_NOT = {
    "cuda": (
        "workspaces of kernels other than cuBLAS's, as of convolutions",
        "the CUDA context and gaps between the allocator's blocks, usually 0.5 to 1.5 GB",
        "kernels that only a GPU chooses: the step is that of CPU kernels, with masks of dropout in the model's dtype",
    ),
    "cpu": ("workspaces of kernels other than convolutions", "the interpreter and its libraries"),
}
UNTRIED = 'blocks need slices="auto" unless their bits are those of the whole there, which is tried on the device only'
SLOW = 1.0  # of the time of the step as it is, from which on a warning says what the plan adds
TIMES = "times are from peak rates, to compare plans by: steps take longer, 2 to 8 times on the CPUs that were tried"


@dataclass(frozen=True, eq=False)
class FitResult:
    """A plan for a device that is not here.

    Attributes:
        title: what the model is.
        parameters: the number of them.
        sizes: the batch and the tokens of the call; empty for a factory that takes none.
        asked: the budget that was asked for; that of the report is lower where torch's allocator holds more.
        sought: "batch" or "seq", if the largest was asked for.
    """

    report: Report
    title: str
    parameters: int
    sizes: dict[str, int]
    profile: DeviceProfile
    asked: int
    sought: str = ""
    largest: Largest | None = None

    @property
    def not_counted(self) -> tuple[str, ...]:
        """The bytes that the forecast leaves out."""
        return COUNTED_NOT[self.profile.kind]

    def to_json(self) -> str:
        """Return all figures as JSON; the plan itself is `report.to_json()`."""
        captured, forecast = self.report.choice.captured, self.report.forecast
        largest = self.largest and {
            self.sought: self.largest.size, "next": self.largest.next, "next_nbytes": self.largest.next_nbytes
        }  # fmt: skip
        found: dict[str, Any] = {
            "model": self.title,
            "parameters": self.parameters,
            **self.sizes,
            "device": self.profile.name,
            "budget": self.report.budget,
            "peak": forecast.peak,
            "held": self._on_card,
            "us": forecast.us,
            "as_it_is": {"peak": captured.peak, "us": captured.us},
            "at_the_peak": {kind: int(rows[forecast.total.argmax()]) for kind, rows in forecast.by_kind.items()},
            "decisions": len(self.report.plan),
            "largest": largest,
            "not_counted": self.not_counted,
        }
        return json.dumps(found, indent=1)

    def __rich__(self) -> RenderableType:
        sizes = [f"{name} {size}" for name, size in self.sizes.items()]
        device = self.profile.title or self.profile.name
        head = f"{self.title}, {self.parameters / 1e6:.1f}M parameters; {', '.join([*sizes, device])}"
        left_out = f"not counted: {'; '.join(self.not_counted)}; {TIMES}"
        tried = [UNTRIED] if self.report.row_blocks else []
        return stacked(head, *self._largest(), *self._held(), *self._slow(), self.report, "", *tried, left_out)

    @property
    def _on_card(self) -> int | None:
        return self.report.on_card if self.profile.kind == "cuda" else None

    def _held(self) -> list[str]:
        """Say what the device will hold, which decides whether it fits."""
        if self._on_card is None:
            return []
        said = f"torch's allocator would hold {mb(self._on_card)} of the {mb(self.profile.memory)} that the device has"
        if self.report.budget < self.asked:
            lowered = f"so {mb(self.report.budget)} are planned for"
            said += f"; with a budget of {mb(self.asked)} that would be too much, {lowered}"
        return [said]

    def _slow(self) -> list[str]:
        """Say that a step fits for the price of one that takes more than twice as long."""
        if self.report.overhead <= SLOW:
            return []
        return [
            f"warning: it fits for {1 + self.report.overhead:.1f} times the time that the step takes as it is, which "
            f"needs {mb(self.report.whole or self.report.choice.captured.peak)}: a smaller batch, or a larger device, "
            "may train faster"
        ]

    def _largest(self) -> list[str]:
        if self.largest is None:
            return []
        found = self.largest
        most = "none needs more: does the factory use it?" if found.size >= FARTHEST else "the model takes no more"
        beyond = f"{found.next} needs {mb(found.next_nbytes)}" if found.next_nbytes else most
        return [f"largest {self.sought}: {found.size}; {beyond}"]

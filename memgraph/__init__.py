"""Train any module under a byte budget."""

from .compiler import compile, plan
from .errors import BudgetError, CaptureError, MemgraphError
from .module import CompiledModule
from .report import Report
from .spill import SpillError

__all__ = ["BudgetError", "CaptureError", "CompiledModule", "MemgraphError", "Report", "SpillError", "compile", "plan"]

"""A linear program: columns between two ends with a cost each, and rows, which are sums of columns between two ends.

x = lp.add_column(cost=2.0);  lp.add_row(1.0, INFINITY, {x: 1.0})   ->   the least 2 x with x >= 1
"""

from __future__ import annotations

import math

INFINITY = math.inf
Row = tuple[float, float, dict[int, float]]  # least, most, coefficient of each column


class LinearProgram:
    """Columns and rows in the order in which they were added.

    Attributes:
        bounds, costs: of each column.
        rows: least, most and coefficients of each row.
    """

    def __init__(self) -> None:
        self.bounds: list[tuple[float, float]] = []
        self.costs: list[float] = []
        self.rows: list[Row] = []
        self.row_count = 0

    def add_column(self, cost: float = 0.0, least: float = 0.0, most: float = 1.0) -> int:
        """Add a column between two ends; return its index."""
        self.bounds.append((least, most))
        self.costs.append(cost)
        return len(self.costs) - 1

    def add_row(self, least: float, most: float, coefficients: dict[int, float]) -> int:
        """Add a row: a sum of columns between two ends; return its index."""
        self.rows.append((least, most, coefficients))
        self.row_count += 1
        return self.row_count - 1

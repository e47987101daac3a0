"""A measured number with its samples, its bound, and what must be said about it; and the table.

Knows: how to write numbers. Does not know: how they were measured.
"""

import statistics
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

HEAD = ["", "measure", "median", "min to max", "bound", "share", ""]


@dataclass(frozen=True)
class Row:
    """One metric of one workload. Without samples there is no number, and `note` says why."""

    workload: str
    metric: str
    unit: str
    samples: list[float]
    bound: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        """Of the samples; there must be some."""
        return statistics.median(self.samples)

    @property
    def share(self) -> float | None:
        """The part of the bound that is reached. Of seconds, fewer are better."""
        if not self.samples or not self.bound or not self.median:
            return None
        return self.bound / self.median if self.unit in ("s", "µs") else self.median / self.bound

    def cells(self) -> list[str]:
        """The row as text, a string for each column."""
        some = self.samples
        return [
            self.workload,
            f"{self.metric}, {self.unit}",
            number(self.median) if some else "none",
            f"{number(min(some))} to {number(max(some))}" if some else "",
            "none" if self.bound is None else number(self.bound),
            "" if self.share is None else f"{self.share:.0%}",
            self.note,
        ]


def number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def table(rows: SequenceOf[Row]) -> str:
    """The rows in columns: words to the left, numbers to the right."""
    cells = [HEAD, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = zip(widths, "<<>>>><", strict=True)
    form = "  ".join(f"{{:{side}{width}}}" for width, side in aligned)
    return "\n".join(form.format(*line).rstrip() for line in cells)

"""The numbers of one cell of a study."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, stdev

from fedbe.reproduce.study import Cell


@dataclass(frozen=True)
class CellResult:
    """The numbers of one cell.

    Attributes:
        cell: The cell.
        by_seed: seed -> our value in the study's unit, for finished runs.
        paper: The paper's mean and standard deviation, as far as it gives them.
        under_way: A phrase for each run that is not finished.
        decimals: How many decimals of our numbers are shown.
    """

    cell: Cell
    by_seed: Mapping[int, float]
    paper: tuple[float, ...]
    under_way: tuple[str, ...] = ()
    decimals: int = 1

    @property
    def ours(self) -> tuple[float, ...]:
        """Our values, one for each finished seed."""
        return tuple(self.by_seed.values())

    @property
    def text(self) -> str:
        """Our mean ± standard deviation and number of seeds."""
        if not self.ours:
            return "–"
        spread = f" ± {stdev(self.ours):.{self.decimals}f}" if len(self.ours) > 1 else ""
        return f"{mean(self.ours):.{self.decimals}f}{spread} (n={len(self.ours)})"

    @property
    def paper_text(self) -> str:
        """The paper's mean ± standard deviation."""
        return " ± ".join(f"{v:.2f}" if i else f"{v:.1f}" for i, v in enumerate(self.paper)) or "–"

    @property
    def difference(self) -> str:
        """Our mean minus the paper's."""
        return f"{mean(self.ours) - self.paper[0]:+.{self.decimals}f}" if self.ours and self.paper else "–"

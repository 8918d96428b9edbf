"""A study is a recipe and a grid: one table or figure of the paper, as data.

Every axis has named values. A value is a list of changes to the recipe, in the form that `--set` takes. A cell is one
value of each axis. The paper's numbers have the names of their cells.
"""

import itertools
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedbe.errors import RecipeError, SettingError, nearest
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import load_recipe

SHIPPED = Path(__file__).parent / "studies"
Scale = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")
Cell = tuple[str, ...]

EMBEDDED = ("digits", "swissroll")
# Display names, for pictures.
NAMES = {
    "swissroll": "Swiss roll",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cifar100-10000": "CIFAR-100, 10,000 images",
    "tiny-imagenet": "Tiny-ImageNet",
}
# The smallest form of a study: embedded data, a tiny network, two rounds. It shows that the study runs.
SMOKE = (
    "data.source=digits", "data.server=200", "data.pad=0", "data.flip=false", "data.mean=", "data.std=",
    "model.name=mlp", "training.rounds=2",
    "training.epochs=1", "training.one_round_epochs=2", "settings.distill_epochs=1", "settings.num_samples=2",
)  # fmt: skip
# What the smoke scale uses in place of other data sets and larger numbers.
SMOKE_VALUES = {
    "data.unlabeled": "fedbe.data.embedded:noise",
    "data.unlabeled_size": "100",
    "split.minor_images": "1",
}


class ScaleLimits(BaseModel):
    """How a scale is smaller than the paper's experiment.

    Attributes:
        changes: Changes to every cell.
        keep: axis -> the values that the scale runs; all values of axes that are not listed.
        seeds: The number of seeds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    changes: tuple[str, ...] = ()
    keep: dict[str, tuple[str, ...]] = {}
    seeds: Annotated[int, Field(ge=1)] = 1


class Study(BaseModel):
    """One table or figure of the paper.

    Attributes:
        name: The name of its TOML file.
        title: What it is in the paper.
        recipe: The base recipe of all cells.
        rows: The axes of the rows, outermost first.
        columns: The axis of the columns.
        axes: axis -> value -> changes. "recipe=NAME" and "method=NAME" choose the base recipe and the method.
        analysis: What is computed from each finished run, by its name in `analysis.ANALYSES`; empty for nothing.
        metric: The path of the number in the last record or in the result of the analysis, e.g. test.accuracy or
            analysis.{models}.ECE, where {axis} stands for the cell's value. A table has one path for each value of
            the columns, or for single cells.
        measured: What the numbers are.
        unit: percent (a number of a record is multiplied by 100) or seconds.
        without: Cells that the paper leaves out.
        paper: cell -> [mean, std] or [mean], in percent. A cell is named by its values, joined by "/".
        cpu: The limits of the scale `cpu`.
        note: A sentence for the table.
        heat_map: Whether the study is our own and is drawn as a heat map: a panel for each value of the first row axis,
            with the worst row of each column marked.
        extra: The user's changes to every cell, at every scale.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    recipe: str
    rows: tuple[str, ...]
    columns: str
    axes: dict[str, dict[str, tuple[str, ...]]]
    analysis: str = ""
    metric: str | dict[str, str] = "test.accuracy"
    measured: str = "test accuracy in percent"
    unit: Literal["percent", "seconds"] = "percent"
    without: tuple[str, ...] = ()
    paper: dict[str, tuple[float, ...]] = {}
    cpu: ScaleLimits = ScaleLimits()
    note: str = ""
    heat_map: bool = False
    extra: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if set(self.axes) != {*self.rows, self.columns}:
            raise ValueError(f"rows and columns must name every axis: {', '.join(self.axes)}")
        cells = {"/".join(values) for values in itertools.product(*(self.axes[axis] for axis in self.axis_order))}
        for cell in self.paper:
            if cell not in cells:
                raise ValueError(f"the paper's number '{cell}' does not belong to a cell")
        for axis, values in self.cpu.keep.items():
            if unknown := set(values) - set(self.axes.get(axis, ())):
                raise ValueError(f"`cpu.keep` names '{min(unknown)}', which is not a value of the axis '{axis}'")
        return self

    @property
    def axis_order(self) -> tuple[str, ...]:
        """The axes in the order of a cell's values: the rows' axes, then the columns'."""
        return (*self.rows, self.columns)

    def limits(self, scale: Scale) -> ScaleLimits:
        """How `scale` is smaller than the paper's experiment."""
        if scale == "paper":
            return ScaleLimits(seeds=5)
        return self.cpu if scale == "cpu" else ScaleLimits(changes=SMOKE, keep=self._smoke_values())

    def _smoke_values(self) -> dict[str, tuple[str, ...]]:
        """Two values of each axis. An axis without changes keeps all: its values are views of the same runs."""
        return {axis: tuple(values)[: 2 if any(values.values()) else None] for axis, values in self.axes.items()}

    def cells(self, scale: Scale) -> list[Cell]:
        """The cells that a scale runs, each with a value for every axis in `axis_order`."""
        keep = self.limits(scale).keep
        grid = itertools.product(*(keep.get(axis, tuple(self.axes[axis])) for axis in self.axis_order))
        return [cell for cell in grid if "/".join(cell) not in self.without]

    def with_changes(self, changes: Iterable[str]) -> Self:
        """The same study with further changes to every cell."""
        return self.model_copy(update={"extra": tuple(changes)})

    def select(self, values: Sequence[str], scale: Scale) -> set[Cell]:
        """The cells of a scale that have the given values. Axes without a given value are not restricted.

        Raises:
            SettingError: A value is not on any axis at this scale.

        Example:
            >>> sorted(load_study("table1").select(["dirichlet", "fedavg", "fedbe"], "cpu"))
            [('dirichlet', 'fedavg', 'convnet'), ('dirichlet', 'fedbe', 'convnet')]
        """
        cells = self.cells(scale)
        known = {value for cell in cells for value in cell}
        for value in values:
            if value not in known:
                raise SettingError(f"{self.name} has no '{value}' at the scale {scale}: {nearest(value, known)}")
        return {cell for cell in cells if self._matches(cell, values)}

    def _matches(self, cell: Cell, values: Sequence[str]) -> bool:
        for axis, cell_value in zip(self.axis_order, cell, strict=True):
            allowed = [value for value in values if value in self.axes[axis]]
            if allowed and cell_value not in allowed:
                return False
        return True

    def recipe_for(self, cell: Cell, scale: Scale) -> Recipe:
        """The recipe of a cell: the base with the paper's variant, then the cell's changes, then the scale's."""
        changes = [change for change in self._cell_changes(cell) if not change.startswith("recipe=")]
        if scale == "smoke" and not self._is_embedded(cell):
            changes = _without_real_data(changes)
        return load_recipe(self.base_recipe(cell), ["variant=paper", *changes, *self.scale_changes(cell, scale)])

    def base_recipe(self, cell: Cell) -> str:
        """The name of the recipe that a cell starts from."""
        names = (c.removeprefix("recipe=") for c in self._cell_changes(cell) if c.startswith("recipe="))
        return next(names, self.recipe)

    def scale_changes(self, cell: Cell, scale: Scale) -> tuple[str, ...]:
        """The changes to a cell by the scale and the user. Only `smoke` makes embedded data smaller."""
        changes = self.limits(scale).changes
        if self._is_embedded(cell):
            changes = tuple(c for c in changes if scale == "smoke" and not c.startswith(("data.", "model.")))
        return (*changes, *self.extra)

    def _cell_changes(self, cell: Cell) -> list[str]:
        by_axis = (self.axes[axis][value] for axis, value in zip(self.axis_order, cell, strict=True))
        return list(itertools.chain.from_iterable(by_axis))

    def _is_embedded(self, cell: Cell) -> bool:
        return _data_source(self.base_recipe(cell)) in EMBEDDED

    @property
    def metric_in_rounds(self) -> bool:
        """Whether the record of every round has the metric, not only the analysis of a finished run."""
        return all(self.metric_for(cell).startswith("test") for cell in self.cells("paper"))

    def metric_for(self, cell: Cell) -> str:
        """The path of a cell's number in the last record."""
        if isinstance(self.metric, str):
            return self.metric.format_map(dict(zip(self.axis_order, cell, strict=True)))
        return self.metric.get("/".join(cell), self.metric.get(cell[-1], "test.accuracy"))

    def left_out(self, scale: Scale) -> dict[str, list[str]]:
        """axis -> the values that a scale does not run; only axes with such values."""
        keep = self.limits(scale).keep
        left_out = {axis: [v for v in values if v not in keep.get(axis, values)] for axis, values in self.axes.items()}
        return {axis: values for axis, values in left_out.items() if values}


@cache
def _data_source(recipe: str) -> str:
    return load_recipe(recipe).data.source


def _without_real_data(changes: list[str]) -> list[str]:
    """A cell's changes that embedded data and a tiny network can take; other images become noise."""
    pairs = [c.partition("=") for c in changes if not c.startswith(("model.", "data.server"))]
    return [f"{key}={SMOKE_VALUES.get(key, value)}" for key, _, value in pairs]


def parse_scale(text: str) -> Scale:
    """The scale of that name; a SettingError if there is none."""
    for scale in SCALES:
        if scale == text:
            return scale
    raise SettingError(f"unknown scale '{text}': {nearest(text, SCALES)}")


def available_studies() -> dict[str, Path]:
    """The studies that come with fedbe: name -> TOML file."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def load_study(name: str) -> Study:
    """Read a study.

    Raises:
        RecipeError: There is no such study, or its file is not valid.
    """
    path = available_studies().get(name)
    if path is None:
        raise RecipeError(f"no study '{name}': {nearest(name, available_studies())}")
    try:
        return Study.model_validate({"name": name, **tomllib.loads(path.read_text(encoding="utf-8"))})
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise RecipeError(f"the study '{name}' is not valid: {error}") from error

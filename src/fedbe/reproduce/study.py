"""A study is a recipe and a grid: one table or figure of the paper, as data.

Every axis has named values; a value is a list of changes to the recipe (as `--set` takes them). A cell is one value of
each axis. The paper's numbers are given by the same names.
"""

import itertools
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedbe.errors import RecipeError, SettingError, nearest
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import load_recipe

SHIPPED = Path(__file__).parent / "studies"
Scale = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "paper")

EMBEDDED = ("digits", "swissroll")
# As people write them; for pictures.
NAMES = {
    "swissroll": "Swiss roll",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cifar100-10000": "CIFAR-100, 10,000 images",
    "tiny-imagenet": "Tiny-ImageNet",
}
# The smallest form of anything: embedded data, a tiny network, two rounds. It proves that a study runs.
SMOKE = (
    "data.source=digits", "data.server=200", "data.pad=0", "data.flip=false", "model.name=mlp", "training.rounds=2",
    "training.epochs=1", "training.one_round_epochs=2", "settings.distill_epochs=1", "settings.num_samples=2",
)  # fmt: skip


class Limits(BaseModel):
    """How a scale is smaller than the paper: changes to every cell, and the values that are kept of an axis."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    changes: tuple[str, ...] = ()
    keep: dict[str, tuple[str, ...]] = {}
    seeds: Annotated[int, Field(ge=1)] = 1


class Study(BaseModel):
    """One table or figure.

    title    what it is in the paper
    recipe   the base that all cells change
    rows     the axes that make the rows, outermost first; the axis `columns` makes the columns
    axes     axis -> value -> changes; the changes "recipe=NAME" and "method=NAME" choose the base and the method
    analysis what is done with each finished run, by its name in `analysis`; none if empty
    metric   path of the number in the last record, or in what the analysis found: test.accuracy, analysis.{models}.ECE
             ({axis} stands for the cell's value); or one for each value of the columns, or for single cells
    measured what the numbers are
    without  cells that the paper leaves out
    extra    changes to every cell at every scale, made by who asks for the study
    paper    cell -> [mean, std] or [mean], in percent; cells are named by their values, joined by /
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
    without: tuple[str, ...] = ()
    paper: dict[str, tuple[float, ...]] = {}
    cpu: Limits = Limits()
    note: str = ""
    extra: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if set(self.axes) != {*self.rows, self.columns}:
            raise ValueError(f"rows and columns must name every axis: {', '.join(self.axes)}")
        known = {"/".join(values) for values in itertools.product(*(self.axes[a] for a in self.order))}
        if wrong := [cell for cell in self.paper if cell not in known]:
            raise ValueError(f"the paper's number '{wrong[0]}' is of no cell")
        if wrong := [v for axis, kept in self.cpu.keep.items() for v in kept if v not in self.axes.get(axis, ())]:
            raise ValueError(f"'{wrong[0]}', which the scale cpu keeps, is of no axis")
        return self

    @property
    def order(self) -> tuple[str, ...]:
        return (*self.rows, self.columns)

    def limits(self, scale: Scale) -> Limits:
        if scale == "paper":
            return Limits(seeds=5)
        return self.cpu if scale == "cpu" else Limits(changes=SMOKE, keep=self._first_two())

    def _first_two(self) -> dict[str, tuple[str, ...]]:
        """Of an axis without changes all values: they are views of the same runs and cost nothing."""
        return {axis: tuple(values)[: 2 if any(values.values()) else None] for axis, values in self.axes.items()}

    def cells(self, scale: Scale) -> list[tuple[str, ...]]:
        """The cells of a scale, each a value for every axis in `order`."""
        keep = self.limits(scale).keep
        grid = itertools.product(*(keep.get(axis, tuple(self.axes[axis])) for axis in self.order))
        return [cell for cell in grid if "/".join(cell) not in self.without]

    def with_changes(self, changes: Iterable[str]) -> Self:
        """The same study with further changes to every cell."""
        return self.model_copy(update={"extra": tuple(changes)})

    def wanted(self, values: Sequence[str], scale: Scale) -> set[tuple[str, ...]]:
        """The cells of a scale that have one of the given values on each axis that a value is given of; all if none.

        >>> sorted(load_study("table1").wanted(["dirichlet", "fedavg", "fedbe"], "cpu"))
        [('dirichlet', 'fedavg', 'convnet'), ('dirichlet', 'fedbe', 'convnet')]
        """
        cells = self.cells(scale)
        there = {value for cell in cells for value in cell}
        if wrong := [v for v in values if v not in there]:
            raise SettingError(f"{self.name} has no '{wrong[0]}' at the scale {scale}: {nearest(wrong[0], there)}")
        asked = [{v for v in values if v in self.axes[axis]} for axis in self.order]
        return {cell for cell in cells if all(not own or v in own for v, own in zip(cell, asked, strict=True))}

    def recipe_for(self, cell: tuple[str, ...], scale: Scale) -> Recipe:
        """The recipe of one cell: base, then the cell's own changes, then what the scale makes smaller."""
        changes = [c for c in self._changes(cell) if not c.startswith("recipe=")]
        if scale == "smoke" and not self._embedded(cell):
            changes = _without_real_data(changes)
        return load_recipe(self.base(cell), [*changes, *self.smaller(cell, scale)])

    def base(self, cell: tuple[str, ...]) -> str:
        """The name of the recipe that a cell starts from."""
        return next((c.removeprefix("recipe=") for c in self._changes(cell) if c.startswith("recipe=")), self.recipe)

    def smaller(self, cell: tuple[str, ...], scale: Scale) -> tuple[str, ...]:
        """What a scale changes in a cell. Embedded data is small enough as it is, but smoke is in a hurry."""
        changes = self.limits(scale).changes
        if self._embedded(cell):
            changes = tuple(c for c in changes if scale == "smoke" and not c.startswith(("data.", "model.")))
        return (*changes, *self.extra)

    def _changes(self, cell: tuple[str, ...]) -> list[str]:
        return [c for axis, value in zip(self.order, cell, strict=True) for c in self.axes[axis][value]]

    def _embedded(self, cell: tuple[str, ...]) -> bool:
        return load_recipe(self.base(cell)).data.source in EMBEDDED

    @property
    def metric_of_rounds(self) -> bool:
        """Whether every round has the metric, not only what is made of a finished run."""
        return all(self.metric_for(cell).startswith("test") for cell in self.cells("paper"))

    def metric_for(self, cell: tuple[str, ...]) -> str:
        if isinstance(self.metric, str):
            return self.metric.format_map(dict(zip(self.order, cell, strict=True)))
        return self.metric.get("/".join(cell), self.metric.get(cell[-1], "test.accuracy"))

    def left_out(self, scale: Scale) -> dict[str, list[str]]:
        """Values that a scale does not run, by axis."""
        keep = self.limits(scale).keep
        gone = {axis: [v for v in values if v not in keep.get(axis, values)] for axis, values in self.axes.items()}
        return {axis: values for axis, values in gone.items() if values}


def _without_real_data(changes: list[str]) -> list[str]:
    """Changes that embedded data and a tiny network can take: other images become noise, networks the MLP."""
    stand_ins = {
        "data.unlabeled": "fedbe.reproduce.smoke:images",
        "data.unlabeled_size": "100",
        "split.minor_images": "1",
    }
    kept = [c.partition("=") for c in changes if not c.startswith(("model.", "data.server"))]
    return [f"{key}={stand_ins.get(key, value)}" for key, _, value in kept]


def available() -> dict[str, Path]:
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def load_study(name: str) -> Study:
    """A study by name."""
    path = available().get(name)
    if path is None:
        raise RecipeError(f"no study '{name}': {nearest(name, available())}")
    try:
        return Study.model_validate({"name": name, **tomllib.loads(path.read_text(encoding="utf-8"))})
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise RecipeError(f"the study '{name}' is not valid: {error}") from error

"""What a recipe may say. Each setting with its meaning; pydantic checks the values."""

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedbe.algorithms.client.lr_schedule import SCHEDULES
from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.methods import METHODS, VARIANTS, Method, check_kind, get_method
from fedbe.errors import SettingError, nearest

Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of a recipe: unknown names are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Data(Section):
    """Where the images come from.

    source          a known name, folder:PATH, npz:PATH or module:function
    server          training images that are set apart as the server's unlabeled data
    unlabeled       another source for the server's data; then the `server` images stay unused
    unlabeled_size  how many of the server's images are used; all of them if not given
    pad, flip       augmentation of images: padding in pixels before the random crop, horizontal flip
    """

    source: str = "digits"
    server: Annotated[int, Field(ge=0)] = 300
    unlabeled: str | None = None
    unlabeled_size: Count | None = None
    pad: Annotated[int, Field(ge=0)] = 0
    flip: bool = False


class Split(Section):
    """Who has which images; see `fedbe.data.splits`."""

    kind: Literal["iid", "step", "dirichlet", "column"] = "step"
    clients: Count = 10
    major_classes: Count | None = None
    minor_images: Annotated[int, Field(ge=0)] | None = None
    major_share: Annotated[float, Field(gt=0, le=1)] | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None

    def settings(self) -> dict[str, Any]:
        return self.model_dump(exclude={"kind", "clients"}, exclude_none=True)


class Model(BaseModel):
    """name: a network of `fedbe.models`, or module:function; everything else is a setting of that network."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "mlp"

    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Training(Section):
    """The federation's rounds and the clients' SGD.

    rounds             rounds of communication
    clients_per_round  how many clients take part in a round; all if not given
    epochs             E; or [low, high]: each client has its own number, drawn once, uniformly
    one_round_epochs   E of the one long round of 1-Ensemble
    batch, lr, momentum, weight_decay   of local SGD
    lr_decay           factor on lr after every step of a round; 1 for none
    schedule           of lr over rounds: paper, released or constant
    """

    rounds: Count = 10
    clients_per_round: Count | None = None
    epochs: Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], Count] = 5
    one_round_epochs: Count = 200
    batch_size: Count = 40
    lr: Annotated[float, Field(gt=0)] = 0.01
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 1e-3
    schedule: str = "paper"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule '{self.schedule}': {nearest(self.schedule, SCHEDULES)}")
        if isinstance(self.epochs, tuple) and self.epochs[0] > self.epochs[1]:
            raise ValueError(f"epochs must be [low, high], got {list(self.epochs)}")
        return self


class Evaluation(Section):
    """What is measured on the test data.

    every     rounds between two measurements of the global model; the last round is always measured
    ensemble  letters of an ensemble (S, A, C) whose vote is measured too, whatever the method; empty for none
    clients   whether each client's own model is measured too
    """

    every: Count = 1
    ensemble: str = ""
    clients: bool = False


class Recipe(Section):
    """A whole experiment.

    variant          paper, released or tuned: a named set of settings, over which the recipe's own win
    settings         of methods, by name; each method takes those that it has
    method_settings  settings for one method only: method_settings.fedbe.num_samples = 20
    """

    name: str = "unnamed"
    summary: str = ""
    method: str = "fedbe"
    variant: str = "paper"
    data: Data = Data()
    split: Split = Split()
    model: Model = Model()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    settings: dict[str, Any] = {}
    method_settings: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        try:
            self._check_methods()
        except SettingError as error:
            raise ValueError(str(error)) from error
        asked = self.training.clients_per_round
        if asked is not None and asked > self.split.clients:
            raise ValueError(f"clients_per_round is {asked}, but there are only {self.split.clients} clients")
        size, own = self.data.unlabeled_size, self.data.server
        if size is not None and self.data.unlabeled is None and size > own:
            raise ValueError(f"unlabeled_size is {size}, but the server has only {own} images (data.server)")
        return self

    def _check_methods(self) -> None:
        known = {name: default for m in METHODS.values() for name, default in m.settings().items()}
        for name, value in self.settings.items():
            if name not in known:
                raise SettingError(f"no method has a setting '{name}': {nearest(name, sorted(known))}")
            check_kind(name, known[name], value)  # also where only `evaluation.ensemble` uses it
        for name in {self.method, *self.method_settings}:
            self.method_for(name)
        if self.evaluation.ensemble:
            self.ensemble(self.method_for(), members=self.evaluation.ensemble)

    def rounds(self, method: Method) -> int:
        """How many rounds a method plays."""
        return 1 if method.one_round else self.training.rounds

    def ensemble(self, method: Method, **changes: Any) -> EnsembleSettings:
        """The ensemble that method and recipe describe, whether or not the method itself lets one vote."""
        values = {**VARIANTS[self.variant], **self.settings, **method.settings(), **changes}
        return EnsembleSettings(**{f.name: values[f.name] for f in fields(EnsembleSettings) if f.name in values})

    def method_for(self, name: str | None = None) -> Method:
        """The row of the catalogue with this recipe's settings."""
        name = name or self.method
        method = get_method(name, self.variant)
        own = {k: v for k, v in self.settings.items() if k in method.settings()}
        return method.with_settings(own | self.method_settings.get(name, {}))

"""The settings of an experiment. pydantic checks names and values."""

from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedbe.algorithms.client.lr_schedule import SCHEDULES
from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.methods import DEFAULT_VARIANT, METHODS, Method, check_kind, get_method, variant_settings
from fedbe.errors import SettingError, nearest
from fedbe.experiment.attacks import Attacker

Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of a recipe. Unknown names are refused, and values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Data(Section):
    """The data set and the server's unlabeled data.

    Attributes:
        source: A known name, folder:PATH, npz:PATH or module:function.
        server: How many training examples are set apart as the server's unlabeled data.
        unlabeled: Another source for the server's data; the `server` examples then stay unused.
        unlabeled_size: How many examples of the server's data are used; default: all.
        validation: How many training examples are measured instead of the test data, to choose settings without
            looking at the test data. They are the same for every seed.
        pad: Augmentation of images: padding in pixels before a random crop.
        flip: Augmentation of images: random horizontal flips.
        mean: The mean of each channel, for normalisation; default: computed from the training data.
        std: The standard deviation of each channel, likewise.
    """

    source: str = "digits"
    server: Annotated[int, Field(ge=0)] = 300
    unlabeled: str | None = None
    unlabeled_size: Count | None = None
    validation: Annotated[int, Field(ge=0)] = 0
    pad: Annotated[int, Field(ge=0)] = 0
    flip: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None


class Split(Section):
    """How the training data is divided among clients; `fedbe.data.splits` explains the kinds and their settings."""

    kind: Literal["iid", "step", "dirichlet", "quantity", "shards", "column"] = "step"
    clients: Count = 10
    major_classes: Count | None = None
    minor_images: Annotated[int, Field(ge=0)] | None = None
    major_share: Annotated[float, Field(gt=0, le=1)] | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None
    shards_per_client: Count | None = None

    def settings(self) -> dict[str, Any]:
        """The settings of this kind of split that are set."""
        return self.model_dump(exclude={"kind", "clients"}, exclude_none=True)


class Model(BaseModel):
    """The network.

    Attributes:
        name: A network of `fedbe.models`, or module:function. All other names are settings of that network.
        output: Which part of the network's output are the logits, a name or a position; see `ModelRunner`.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "mlp"
    output: str | int | None = None

    def settings(self) -> dict[str, Any]:
        """The settings of the network."""
        return dict(self.model_extra or {})


class Training(Section):
    """The federation's rounds and the clients' SGD.

    Attributes:
        rounds: Rounds of communication.
        clients_per_round: How many clients take part in a round; default: all.
        epochs: Local epochs E; or [low, high]: each client has its own number, drawn uniformly.
        redraw_epochs: Whether these numbers are drawn again in each round, and not once for all rounds.
        one_round_epochs: Local epochs in the one long round of 1-Ensemble.
        batch_size: Batch size of local SGD.
        lr: Learning rate of local SGD in round 1.
        lr_decay: Factor on the learning rate after every step of a round; 1 for none.
        lr_drop_epochs: Within a round, the learning rate falls to a tenth after every so many epochs; 0 for never.
        momentum: Momentum of local SGD.
        weight_decay: Weight decay of local SGD.
        decay_biases: Whether weight decay applies to biases.
        schedule: How the learning rate falls over rounds: paper, released or constant.
    """

    rounds: Count = 10
    clients_per_round: Count | None = None
    epochs: Annotated[int, Field(ge=0)] | tuple[Annotated[int, Field(ge=0)], Count] = 5
    redraw_epochs: bool = False
    one_round_epochs: Count = 200
    batch_size: Count = 40
    lr: Annotated[float, Field(gt=0)] = 0.01
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    lr_drop_epochs: Annotated[int, Field(ge=0)] = 0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 1e-3
    decay_biases: bool = True
    schedule: str = "paper"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule '{self.schedule}': {nearest(self.schedule, SCHEDULES)}")
        if isinstance(self.epochs, tuple) and self.epochs[0] > self.epochs[1]:
            raise ValueError(f"epochs must be [low, high], got {list(self.epochs)}")
        return self


class Evaluation(Section):
    """What is measured on the test data.

    Attributes:
        every: Rounds between two measurements of the global model; the last round is always measured.
        ensemble: Letters of an ensemble (S, A, C) whose vote is measured too, with any method; empty for none.
        clients: Whether the model of each client is measured too.
    """

    every: Count = 1
    ensemble: str = ""
    clients: bool = False


class GuardLimits(Section):
    """The limits of the server's guard; `fedbe.algorithms.server.limits` explains them.

    Attributes:
        client_weights: "declared", the sizes of the split, which a simulation knows; "reported", what the clients
            say, capped by `max_share` and `max_size_ratio`; or "equal".
        drop_lost_clients: Whether a round goes on without a client whose worker process died several times. That is a
            fault of this machine, so by default the run stops and can be resumed.
    """

    min_clients: Count = 1
    max_norm_ratio: Annotated[float, Field(gt=1)] = 100.0
    max_change: Annotated[float, Field(gt=0)] = 30.0
    max_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    max_size_ratio: Annotated[float, Field(ge=1)] = 20.0
    client_weights: Literal["declared", "reported", "equal"] = "declared"
    drop_lost_clients: bool = False


class Attack(Section):
    """Hostile clients, to see what a method withstands; `fedbe.experiment.attacks` explains the kinds.

    Attributes:
        kind: The name of the attack.
        clients: How many clients are hostile; they are the first ones.
        strength: The factor of the attack; default: its usual one.
        claim: The number of examples that each of them reports; default: the true one. The server ignores it unless
            `limits.client_weights` is "reported".
    """

    kind: str
    clients: Count
    strength: Annotated[float, Field(gt=0)] | None = None
    claim: Annotated[float, Field(gt=0)] | None = None

    def attacker(self) -> Attacker:
        """The hostile clients."""
        return Attacker(self.kind, self.clients, self.strength, self.claim)


class Recipe(Section):
    """A whole experiment.

    Attributes:
        name: The name of the recipe; it goes into the names of run folders.
        summary: One line for `fedbe recipes`.
        method: The method of `fedbe run`.
        variant: A named set of settings: auto, paper, released or tuned. Settings of the recipe win over it.
        data: The data set and the server's unlabeled data.
        split: How the training data is divided among clients.
        model: The network.
        training: Rounds and local SGD.
        evaluation: What is measured on the test data.
        settings: Settings of methods; each method takes those that it has.
        method_settings: Settings for one method only: method_settings.fedbe.num_samples = 20.
        limits: Of the server's guard.
        attack: Hostile clients; default: none.
    """

    name: str = "unnamed"
    summary: str = ""
    method: str = "fedbe"
    variant: str = DEFAULT_VARIANT
    data: Data = Data()
    split: Split = Split()
    model: Model = Model()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    settings: dict[str, Any] = {}
    method_settings: dict[str, dict[str, Any]] = {}
    limits: GuardLimits = GuardLimits()
    attack: Attack | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.name.strip(". ") or set(self.name) & set("/\\") or not self.name.isprintable():
            raise ValueError(
                f"'name' becomes the name of a folder and must have no '/', no '\\' and printable characters only, "
                f"got {self.name!r}"
            )
        try:
            self._check_methods()
            if self.attack is not None:
                self.attack.attacker()
        except SettingError as error:
            raise ValueError(str(error)) from error
        cohort = self.training.clients_per_round
        if cohort is not None and cohort > self.split.clients:
            raise ValueError(f"clients_per_round is {cohort}, but there are only {self.split.clients} clients")
        if self.attack is not None and self.attack.clients >= self.split.clients:
            raise ValueError(f"attack.clients is {self.attack.clients}, but must be below {self.split.clients} clients")
        size, available = self.data.unlabeled_size, self.data.server
        if size is not None and self.data.unlabeled is None and size > available:
            raise ValueError(f"unlabeled_size is {size}, but the server has only {available} inputs (data.server)")
        return self

    def _check_methods(self) -> None:
        known = _known_settings()
        for name, value in self.settings.items():
            if name not in known:
                raise SettingError(f"no method has a setting '{name}': {nearest(name, sorted(known))}")
            check_kind(name, known[name], value)  # also where only `evaluation.ensemble` uses it
        for name in {self.method, *self.method_settings}:
            self.method_for(name)
        if "P" in self.evaluation.ensemble:
            raise SettingError("evaluation.ensemble must not include P: a measurement keeps no earlier averages")
        if self.evaluation.ensemble:
            self.ensemble(self.method_for(), members=self.evaluation.ensemble)

    def rounds(self, method: Method) -> int:
        """The number of rounds that a method runs."""
        return 1 if method.one_round else self.training.rounds

    def ensemble(self, method: Method, **changes: Any) -> EnsembleSettings:
        """The ensemble that the method and the recipe describe, even if the method itself has no vote.

        Args:
            method: The method; its settings win over the recipe's.
            changes: Settings of `EnsembleSettings` that win over both.
        """
        values = {**variant_settings(method, self.variant), **self.settings, **method.settings(), **changes}
        return EnsembleSettings(**{f.name: values[f.name] for f in fields(EnsembleSettings) if f.name in values})

    def method_for(self, name: str | None = None) -> Method:
        """A method with this recipe's settings.

        Args:
            name: The method's name; default: the recipe's method.

        Raises:
            SettingError: The method is unknown, or a setting does not fit it.
        """
        name = name or self.method
        method = get_method(name, self.variant)
        shared = {k: v for k, v in self.settings.items() if k in method.settings()}
        return method.with_settings(shared | self.method_settings.get(name, {}))


@cache
def _known_settings() -> dict[str, Any]:
    """Every setting of every method, with a default."""
    return {name: default for method in METHODS.values() for name, default in method.settings().items()}

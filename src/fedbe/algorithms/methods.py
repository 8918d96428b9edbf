"""The catalogue: every method is one row of data.

A new method is a new row and at most one small rule, transform or stage.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import cache
from numbers import Integral, Real
from typing import Any

from torch import nn

from fedbe.algorithms.balance import known_mix
from fedbe.algorithms.client.rules import ControlVariate, Dynamic, LocalRule, Prox
from fedbe.algorithms.distillation import DistillSettings
from fedbe.algorithms.ensemble import EnsembleSettings
from fedbe.algorithms.server.corrections import Adaptive, DynamicUpdate, Recalibrate
from fedbe.algorithms.server.distill_stage import Distill
from fedbe.algorithms.server.stages import ControlUpdate, KeepMembers, Mean, Momentum, Stage
from fedbe.algorithms.server.transforms import Transform
from fedbe.algorithms.vote import VoteRule, get_vote_rule
from fedbe.errors import SettingError, check_option, check_settings, nearest


@dataclass(frozen=True)
class Method:
    """A federated learning method as data: what clients do, then what the server does.

    Attributes:
        name: the name in recipes and on the command line.
        title: the name in tables and charts.
        summary: one line for `fedbe methods`.
        rules: hooks into the clients' training.
        transforms: run at the server on the admitted updates, before the stages.
        stages: run at the server, in order.
        extras: names of what the rules send back next to the model.
        one_round: whether the method is defined for a single round of communication.
        variants: the variants (`VARIANTS`) whose settings the method takes; in all others it stays as its row.

    Example:
        >>> from fedbe.algorithms.server.transforms import ClipNorm
        >>> method = Method("clipped", "FedAvg (clipped)", "bounded changes", transforms=(ClipNorm(1.0),))
        >>> method.result, method.settings()["max_update_norm"]  # run it with `fedbe.Server(method, model)`
        ('average', 1.0)
    """

    name: str
    title: str
    summary: str
    rules: tuple[LocalRule, ...] = ()
    stages: tuple[Stage, ...] = (Mean(),)
    transforms: tuple[Transform, ...] = ()
    extras: tuple[str, ...] = ()
    one_round: bool = False
    variants: tuple[str, ...] = ("released", "tuned")

    def __post_init__(self) -> None:
        robust = self.settings().get("robust", "none")
        if self.extras and robust != "none":
            raise SettingError(
                f"`robust` must be 'none' for {self.title}, got '{robust}': its server adds up what the clients send "
                "next to the model, so one hostile client could still move it; use a method without such extras"
            )

    def needs_unlabeled(self, module: nn.Module) -> bool:
        """Whether the server needs unlabeled inputs for this model."""
        return any(stage.needs_unlabeled(module) for stage in self.stages)

    @property
    def needs_rounds(self) -> bool:
        """Whether the server must know how many rounds there will be."""
        return any(stage.needs_rounds for stage in self.stages)

    @property
    def replaces_model(self) -> bool:
        """Whether the average becomes something else: a student, or a vote of kept members."""
        return any(stage.replaces_model for stage in self.stages)

    @property
    def releases_mean(self) -> bool:
        """Whether the next model is the plain mean of the updates, and nothing else is made of them."""
        return not self.transforms and all(stage.releases_mean for stage in self.stages)

    @property
    def result(self) -> str:
        """What a round ends with: "average", "model", "student" or "kept members' vote"."""
        results = [stage.result for stage in self.stages if stage.result is not None]
        return results[-1] if results else "model"

    @property
    def vote_rule(self) -> VoteRule:
        """How this method combines the predictions of members."""
        return get_vote_rule(self.settings().get("vote", "mean"))

    def check_classes(self, classes: int) -> None:
        """SettingError if a setting does not fit a model with that number of classes."""
        if mix := self.settings().get("class_mix"):
            known_mix(mix, classes)

    def settings(self) -> dict[str, Any]:
        """Every setting of the method's rules, transforms and stages, with its value.

        Example:
            >>> get_method("fedavgm").settings()["beta"]
            0.9
        """
        return {f.name: value for part in self._parts() for f, value in _settings_of(part)}

    def free_settings(self) -> set[str]:
        """The settings that do not define the method: those at the default of their rule, transform or stage."""
        return {f.name for part in self._parts() for f, value in _settings_of(part) if value == f.default}

    def with_settings(self, settings: Mapping[str, Any]) -> "Method":
        """The same method with other values. Each goes to the rule, transform or stage with a setting of that name.

        Raises:
            SettingError: for an unknown name or a value that cannot work.

        Example:
            >>> get_method("fedprox").with_settings({"proximal_mu": 0.1}).rules
            (Prox(proximal_mu=0.1, prox_form='squared'),)
        """
        known = self.settings()
        check_settings(self.title, settings, known)
        for name, value in settings.items():
            check_kind(name, known[name], value)
        return replace(
            self,
            rules=tuple(_with(part, settings) for part in self.rules),
            transforms=tuple(_with(part, settings) for part in self.transforms),
            stages=tuple(_with(part, settings) for part in self.stages),
        )

    def _parts(self) -> tuple[Any, ...]:
        return (*self.rules, *self.transforms, *self.stages)


def _settings_of(part: Any) -> Iterator[tuple[Field[Any], Any]]:
    """The fields of a part with their values. A nested settings object is replaced by its own fields."""
    for f in fields(part):
        value = getattr(part, f.name)
        if is_dataclass(value):
            yield from _settings_of(value)
        else:
            yield f, value


def _with(part: Any, settings: Mapping[str, Any]) -> Any:
    changes = {}
    for f in fields(part):
        value = getattr(part, f.name)
        if is_dataclass(value):
            changes[f.name] = _with(value, settings)
        elif f.name in settings:
            changes[f.name] = settings[f.name]
    return replace(part, **changes) if changes else part


def check_kind(name: str, default: Any, value: Any) -> None:
    """Refuse a value that is not of the kind of the one that it replaces; `alpha` may also be a mapping."""
    kind: Any
    if isinstance(default, bool | str):
        kind, what = type(default), "true or false" if isinstance(default, bool) else "a word"
    elif isinstance(default, int):
        kind, what = Integral, "a whole number"
    elif isinstance(default, tuple):
        kind, what = list | tuple, "a list of numbers"
    else:
        kind, what = (Real, Mapping) if name == "alpha" else Real, "a number"
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise SettingError(f"`{name}` must be {what}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(f"`{name}` must be a finite number, got {value}")


_CLIENTS_VOTE = EnsembleSettings(members="C")
_PLAIN_SGD = DistillSettings(optimizer="sgd")
# For 10,000 inputs, of which 9,000 teach: 10,011 steps at most, and 994 without a lower loss end them.
_FEDDF = DistillSettings(
    optimizer="adam", distill_epochs=141, distill_patience_epochs=14, sharpening=1.0, augment=False
)
_PAST = EnsembleSettings(members="AP")
_FEDBE_VARIANTS = ("released", "auto", "tuned")
_SCAFFOLD: dict[str, Any] = {"rules": (ControlVariate(),), "extras": ("control",)}

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("fedavg", "FedAvg", "the weighted average of the clients' weights"),
        Method("fedavgm", "FedAvgM", "FedAvg with momentum at the server", stages=(Mean(), Momentum())),
        Method(
            "fedavg-median",
            "FedAvg (median)",
            "the coordinate median of the clients' weights: for clients that may be hostile",
            stages=(Mean(robust="median"),),
        ),
        Method("fedprox", "FedProx", "FedAvg whose clients are held near the global model", rules=(Prox(),)),
        Method(
            "scaffold",
            "SCAFFOLD",
            "FedAvg whose clients correct their drift with control variates",
            stages=(Mean(), ControlUpdate()),
            **_SCAFFOLD,
        ),
        Method(
            "v-distillation",
            "v-Distillation",
            "the clients vote; their average learns the vote by SGD",
            stages=(Mean(), Distill(_CLIENTS_VOTE, _PLAIN_SGD)),
        ),
        Method(
            "1-ensemble",
            "1-Ensemble",
            "one round of long local training; the clients' vote is the prediction, no single model",
            stages=(Mean(), KeepMembers(_CLIENTS_VOTE)),
            one_round=True,
        ),
        Method(
            "fedbe",
            "FedBE",
            "sampled models, average and clients vote; the average learns the vote by SWA",
            stages=(Mean(), Distill()),
            variants=_FEDBE_VARIANTS,
        ),
        Method(
            "fedbe-sgd",
            "FedBE (w/o SWA)",
            "FedBE with plain SGD in the distillation",
            stages=(Mean(), Distill(distillation=_PLAIN_SGD)),
            variants=_FEDBE_VARIANTS,
        ),
        Method(
            "fedbe-median",
            "FedBE (median)",
            "average and clients vote by median, the median model learns: for clients that may be hostile",
            # Without samples: hostile clients would decide the posterior that they are drawn from.
            stages=(Mean(robust="median"), Distill(EnsembleSettings(members="AC", vote="median"))),
            variants=_FEDBE_VARIANTS,
        ),
        Method(
            "fedbe+fedprox",
            "FedBE + FedProx",
            "FedBE with FedProx's clients",
            rules=(Prox(),),
            stages=(Mean(), Distill()),
            variants=_FEDBE_VARIANTS,
        ),
        Method(
            "fedbe+fedavgm",
            "FedBE + FedAvgM",
            "FedBE that starts from the average with server momentum",
            stages=(Mean(), Momentum(), Distill()),
            variants=_FEDBE_VARIANTS,
        ),
        Method(
            "fedbe+scaffold",
            "FedBE + SCAFFOLD",
            "FedBE with SCAFFOLD's clients",
            stages=(Mean(), ControlUpdate(), Distill()),
            **_SCAFFOLD,
            variants=_FEDBE_VARIANTS,
        ),
        # Not in the paper.
        Method(
            "fedavg-bn",
            "FedAvg (measured BatchNorm)",
            "FedAvg whose BatchNorm statistics are recomputed on the server's unlabeled inputs",
            stages=(Mean(), Recalibrate()),
        ),
        Method("fedadam", "FedAdam", "FedAvg with Adam at the server", stages=(Mean(), Adaptive())),
        Method(
            "fedyogi",
            "FedYogi",
            "FedAvg with Yogi at the server",
            stages=(Mean(), Adaptive(adaptive_form="yogi")),
        ),
        Method(
            "feddyn",
            "FedDyn",
            "clients with a dynamic regularizer; the server removes their drift from the mean",
            rules=(Dynamic(),),
            stages=(Mean(mean_weights="uniform"), DynamicUpdate()),
            extras=("gradient",),
        ),
        Method(
            "feddf",
            "FedDF",
            "the clients' mean logits are the vote; their average learns it by Adam, with early stopping",
            stages=(Mean(), Distill(EnsembleSettings(members="C", vote="logits"), _FEDDF)),
            variants=(),  # its row says all of it, and no variant of FedBE changes it
        ),
        Method(
            "past-averages",
            "Past averages (FedSDD-style)",
            "the average and those of earlier rounds vote; the average learns the vote by SGD",
            stages=(Mean(), Distill(_PAST, replace(_PLAIN_SGD, sharpening=1.0))),
            variants=(),  # its row says all of it, and no variant of FedBE changes it
        ),
    )
}

# Named sets of settings (see docs/variants.md). A method takes those that it has and that its row leaves at the
# default: v-Distillation is a vote of the clients in every variant.
#   auto      FedBE as we recommend it: never worse than averaging. Baselines stay as in the paper.
#   released  the authors' program, where it differs from their text. What belongs to clients and data is in the recipes
#             cifar10-step-released and cifar10-dirichlet-released, which also set this variant
#   tuned     an earlier choice for CIFAR-10: large steps in the first 30 % of the rounds, then none
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "released": {
        "posterior": "gaussian-released",
        "statistics": "sampled",
        "distill_lr_min": 1e-3,
        "swa_start_steps": 500,
        "distill_weight_decay": 1e-5,
        "distill_decay_norms": True,
        "augment": False,
        "loss": "kl_over_classes",
        "prox_form": "unsquared",
        "momentum_form": "released",
    },
    "auto": {
        "members": "AC",
        "vote": "softened",
        "balance": True,
        "sharpening": 3.0,
        "distill_lr": 0.03,
        "distill_lr_min": 0.012,
        "gate": "agreement",
        "gate_gain": 0.03,
        "distill_follow": True,
    },
    "tuned": {
        "members": "AC",
        "distill_lr": 0.03,
        "distill_lr_min": 0.012,
        "distill_until": 0.3,
    },
}


DEFAULT_VARIANT = "auto"


def variant_settings(method: Method, variant: str) -> dict[str, Any]:
    """The settings of a variant for a method; none if the method does not take the variant.

    Raises:
        SettingError: for an unknown variant.

    Example:
        >>> variant_settings(METHODS["v-distillation"], "auto")
        {}
    """
    check_option("variant", variant, VARIANTS)
    return VARIANTS[variant] if variant in method.variants else {}


def get_method(name: str, variant: str = DEFAULT_VARIANT, **settings: Any) -> Method:
    """The method of that name, with the settings of a variant. Single settings win over the variant.

    Args:
        name: a row of `METHODS`.
        variant: auto, paper, released or tuned.
        **settings: values for single settings.

    Returns:
        The row of the catalogue with these settings.

    Raises:
        SettingError: for an unknown name, variant or setting.

    Example:
        >>> get_method("fedbe", "paper", num_samples=20).settings()["num_samples"]
        20
    """
    if name not in METHODS:
        raise SettingError(f"unknown method '{name}': {nearest(name, METHODS)}")
    return _with_variant(name, variant).with_settings(settings)


@cache
def _with_variant(name: str, variant: str) -> Method:
    """The method with those settings of a variant that do not define it."""
    method = METHODS[name]
    free = method.free_settings()
    return method.with_settings({k: v for k, v in variant_settings(method, variant).items() if k in free})

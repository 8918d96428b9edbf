"""The public door for people with their own training loop: a server that combines what clients send.

server = FedBE(model, unlabeled=inputs, seed=0)
state = server.aggregate(global_state, [ClientUpdate(state=s, num_examples=n) for s, n in replies])
server.info
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedbe.algorithms import methods
from fedbe.algorithms.ensemble import Member, local_predictor, predict, vote
from fedbe.algorithms.server.context import Context, StepInfo
from fedbe.algorithms.server.guard import Limits, SetAside, check_count
from fedbe.algorithms.server.step import server_step
from fedbe.core.compute import Plan
from fedbe.core.inputs import Augmentation, Inputs, as_inputs
from fedbe.core.model_runner import ModelRunner
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, ClientUpdate
from fedbe.errors import AggregationError, FedBEError, SettingError


@dataclass(frozen=True)
class RoundInfo:
    """What happened in the last `aggregate`: who took part, who was set aside and why, who voted, how long."""

    round: int
    clients: tuple[ClientId, ...]
    set_aside: tuple[SetAside, ...]
    step: StepInfo


class Server:
    """Any method of the catalogue, by name. `fedbe.FedBE(…)` and the other classes are this with the name filled in.

    model          the architecture; it is copied, never changed, and its own weights do not matter
    unlabeled      the server's inputs: a tensor [J, …], a map-style Dataset, or Inputs; for methods that distil
    labels         true labels of those inputs [J]: for reports and the oracle, never needed
    augment        (batch, generator) -> batch, applied while the student learns; False switches off that of Inputs
    seed           all randomness follows from it and the round
    rounds         how many rounds there will be; needed where `distill_until` is below 1, as in the variant tuned
    total_clients  all clients there are; needed by SCAFFOLD when only a part of them replies
    min_clients    fewer usable updates raise AggregationError
    plan           precision and memory layout
    variant        paper; released: the forms of the authors' program; tuned: what we found better (docs/variants.md)
    settings       of the method, by name: num_samples=20, members="SA", proximal_mu=0.01 … (`server.method.settings()`)

    memory and round are all that lives from one `aggregate` to the next; save and set them to resume.
    """

    name = "fedbe"

    def __init__(
        self,
        model: nn.Module,
        *,
        unlabeled: "Inputs | Tensor | Dataset[Any] | None" = None,
        labels: Tensor | None = None,
        augment: Augmentation | bool | None = None,
        seed: int = 0,
        rounds: int | None = None,
        total_clients: int | None = None,
        min_clients: int = 1,
        max_norm_ratio: float = 100.0,
        plan: Plan | None = None,
        variant: str = "paper",
        **settings: Any,
    ) -> None:
        if isinstance(augment, bool):  # the method's switch has the same name
            settings["augment"], augment = augment, None
        self.method = methods.get(self.name, variant, **settings)
        self.runner = ModelRunner(model, plan)
        self.limits = Limits(min_clients, max_norm_ratio)
        for name, value in (("rounds", rounds), ("total_clients", total_clients)):
            if value is not None:
                check_count(name, value)
        self.seed, self.rounds, self.total_clients = seed, rounds, total_clients
        self.inputs = None if unlabeled is None else as_inputs(unlabeled, augment)
        self.labels = _labels(labels, self.inputs)
        needs_unlabeled = self.method.needs_unlabeled(self.runner.module)
        if needs_unlabeled and self.inputs is None:
            raise SettingError(f"{self.method.title} asks models about inputs that the server owns: give `unlabeled`")
        if self.method.needs_rounds and rounds is None:
            raise SettingError(
                f"{self.method.title} with `distill_until` below 1 (as in the variant tuned) needs to know how many "
                "rounds there will be: give `rounds`"
            )
        if needs_unlabeled and self.inputs is not None:
            self.runner.trainable()  # a model that cannot learn is refused now, not when all clients have trained …
            _ask(self.runner, self.inputs)  # … and so is one that cannot be asked
        self.round = 0
        self.memory: Mapping[str, Tensor] = {}
        self.members: tuple[Member, ...] = ()
        self.info: RoundInfo | None = None

    def aggregate(self, global_state: Mapping[str, Tensor], updates: Iterable[ClientUpdate]) -> dict[str, Tensor]:
        """The next global `state_dict`. Nothing given is changed; on an error the server is as it was before."""
        if not isinstance(updates, Iterable):
            raise SettingError(f"`updates` must be ClientUpdates, one after the other, got {type(updates).__name__}")
        layout = self.runner.layout
        context = Context(
            runner=self.runner,
            seed=self.seed,
            round=self.round + 1,
            rounds=self.rounds,
            inputs=self.inputs,
            labels=self.labels,
            total_clients=self.total_clients,
        )
        result = server_step(
            self.method.stages,
            layout.pack(global_state, "`global_state`"),
            updates,
            self.memory,
            context,
            limits=self.limits,
            extras=self.method.extras,
        )
        state = layout.unpack(result.state)
        if beyond := [n for n, t in state.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]:
            raise AggregationError(
                f"the new '{beyond[0]}' has values beyond the range of {state[beyond[0]].dtype}: take a model of "
                "float32 or bfloat16; the global model is unchanged"
            )
        self.round += 1
        self.memory, self.members = result.memory, result.members
        self.info = RoundInfo(self.round, result.clients, result.set_aside, result.info)
        return state

    @property
    def broadcast(self) -> dict[str, dict[str, Tensor]]:
        """What clients need besides the model, by name: SCAFFOLD's control variate, as named tensors."""
        layout = self.runner.layout
        return {
            name: {n: t.clone() for n, t in layout.unpack_params(self.memory[name]).items()}
            for name in self.method.extras
            if name in self.memory
        }

    def predict(self, state: Mapping[str, Tensor], inputs: "Inputs | Tensor | Dataset[Any]") -> Tensor:
        """Probabilities [N, classes, …]: of the model, or the vote of the members that the method keeps."""
        given = as_inputs(inputs, name="inputs")
        if self.members:
            return vote(self.members, local_predictor(self.runner, given)).probabilities
        packed: ModelState = self.runner.layout.pack(state)
        return predict(self.runner, packed, given)


class FedAvg(Server):
    """The weighted average of the clients' weights."""

    name = "fedavg"


class FedAvgM(Server):
    """FedAvg with momentum at the server; settings: beta, momentum_form."""

    name = "fedavgm"


class FedProx(Server):
    """The server side of FedProx is FedAvg's; clients train with `fedbe.Prox`."""

    name = "fedprox"


class Scaffold(Server):
    """SCAFFOLD: clients get `broadcast`, train with `fedbe.ControlVariate` and send the extra "control" back."""

    name = "scaffold"


class VDistillation(Server):
    """The clients vote on `unlabeled`; their average learns the vote by SGD."""

    name = "v-distillation"


class OneEnsemble(Server):
    """One round; `predict` is the clients' vote."""

    name = "1-ensemble"


class FedBE(Server):
    """Sampled models, the average and the clients vote on `unlabeled`; the average learns the vote by SWA."""

    name = "fedbe"


def server(name: str, model: nn.Module, **arguments: Any) -> Server:
    """A server for any method of the catalogue: server("fedbe+fedavgm", model, unlabeled=inputs)."""
    methods.get(name)
    made = type(Server.__name__, (Server,), {"name": name})
    return made(model, **arguments)  # type: ignore[no-any-return]


@torch.no_grad()
def _ask(runner: ModelRunner, inputs: Inputs) -> None:
    """Does the model answer for the first inputs?"""
    runner.module.eval()
    few = inputs.batch(torch.arange(min(2, len(inputs))))
    try:
        runner.logits(few)
    except FedBEError:
        raise
    except Exception as error:
        raise SettingError(f"`unlabeled` must hold inputs that `model` takes, but it says: {error}") from error


def _labels(labels: Tensor | None, inputs: Inputs | None) -> Tensor | None:
    if labels is None:
        return None
    if not isinstance(labels, Tensor) or not labels.ndim:
        raise SettingError(f"`labels` must be a tensor of class indices [J, …], got {type(labels).__name__}")
    if inputs is None or len(labels) != len(inputs):
        count = 0 if inputs is None else len(inputs)
        raise SettingError(f"`labels` must have one entry for each of the {count} inputs, got {len(labels)}")
    if labels.is_floating_point():
        raise SettingError(f"`labels` must be whole numbers (class indices), got {labels.dtype}")
    if bool((labels < 0).any()):
        raise SettingError(f"`labels` must be >= 0 (class indices), got {int(labels.min())}")
    return labels.long()

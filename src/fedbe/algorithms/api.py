"""The public server, for people with their own training loop: combine what clients send.

server = Server("fedbe", model, unlabeled=inputs, seed=0)
state = server.aggregate(global_state, [ClientUpdate(state=s, num_examples=n) for s, n in replies])
print(server.info)
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedbe.algorithms.methods import DEFAULT_VARIANT, Method, get_method
from fedbe.algorithms.round_info import RoundInfo
from fedbe.algorithms.server.context import Context
from fedbe.algorithms.server.limits import ClientWeights, Limits, check_count
from fedbe.algorithms.server.step import server_step
from fedbe.algorithms.vote import Member, local_predictor, predict, vote
from fedbe.core.compute import Plan
from fedbe.core.inputs import Augmentation, Inputs, TensorInputs, as_inputs
from fedbe.core.model_runner import ModelRunner, try_model
from fedbe.core.state import ModelState, all_finite
from fedbe.core.updates import ClientUpdate
from fedbe.errors import AggregationError, SettingError, StateError


class Server:
    """Any method of the catalogue: combines client models into the next global model.

    `fedbe.FedBE(model, …)` and the other classes are this class with the method filled in.

    Args:
        method: a name of `fedbe methods`, or a `Method` of your own.
        model: the architecture. It is copied and never changed. Its weights do not matter, except frozen ones: if some
            parameters have requires_grad=False and others not, only the others are combined, sampled and distilled.
        unlabeled: the server's inputs, for methods that distil: a tensor or array [J, …], several in a tuple or dict, a
            map-style Dataset, a DataLoader, or Inputs.
        labels: true labels [J] of these inputs. They are used for reports and the oracle targets only.
        augment: (batch, generator) -> batch, applied while the student learns. False switches off that of Inputs.
        seed: all randomness follows from it and the round.
        rounds: how many rounds there will be. Needed where `distill_until` is below 1, as in the variant tuned.
        total_clients: the number of all clients. Needed by SCAFFOLD when only some of them reply.
        min_clients: with fewer usable updates, `aggregate` raises AggregationError.
        max_norm_ratio: a client that changes a tensor by more than this many times what is usual is set aside,
        max_change: unless the change is at most this many times the tensor's own norm (see `Limits`).
        max_share: the largest share of the total weight that one client may have; 1 for no limit.
        max_size_ratio: how many times the cohort's median number of examples one client may count.
        client_weights: "reported", the clients' own numbers of examples; "equal"; or numbers by client id.
        plan: device, precision and memory layout. Results stay on the device of `model`.
        output: which part of the model's output are the logits, a name or a position. Default: a tensor as it is,
            `logits` of a dict or a Hugging Face `ModelOutput`, the first entry of a tuple.
        variant: auto; paper; released, the forms of the authors' program; or tuned (docs/variants.md).
        **settings: of the method, by name: num_samples=20, members="SA" … `server.method.settings()` lists them.

    Attributes:
        method: the method with its settings.
        variant: the named set of settings that it was made with.
        round: how many rounds have been aggregated.
        info: what happened in the last one (`RoundInfo`), None before the first.

    Raises:
        SettingError: for an argument that cannot work.
        ModelError: for a model that cannot be copied, trained or run on `unlabeled`.

    Example:
        >>> model = nn.Linear(1, 2, bias=False)
        >>> updates = [
        ...     ClientUpdate({"weight": torch.tensor([[1.0], [2.0]])}, num_examples=1),
        ...     ClientUpdate({"weight": torch.tensor([[5.0], [2.0]])}, num_examples=3),
        ... ]
        >>> Server("fedavg", model).aggregate(model.state_dict(), updates)
        {'weight': tensor([[4.],
                [2.]])}
    """

    def __init__(
        self,
        method: str | Method,
        /,
        model: nn.Module,
        *,
        unlabeled: Any = None,
        labels: Tensor | None = None,
        augment: Augmentation | bool | None = None,
        seed: int = 0,
        rounds: int | None = None,
        total_clients: int | None = None,
        min_clients: int = 1,
        max_norm_ratio: float = 100.0,
        max_change: float = 30.0,
        max_share: float = 0.25,
        max_size_ratio: float = 20.0,
        client_weights: ClientWeights = "reported",
        plan: Plan | None = None,
        output: str | int | None = None,
        variant: str = DEFAULT_VARIANT,
        **settings: Any,
    ) -> None:
        if isinstance(augment, bool):  # the method has a setting of the same name
            settings["augment"], augment = augment, None
        self.method, self.variant = _method(method, variant, settings), variant
        self.runner = ModelRunner(model, plan, output)
        self.limits = Limits(min_clients, max_norm_ratio, max_change, max_share, client_weights, max_size_ratio)
        for name, value in (("rounds", rounds), ("total_clients", total_clients)):
            if value is not None:
                check_count(name, value)
        self.seed, self.rounds, self.total_clients = seed, rounds, total_clients
        self.inputs = None if unlabeled is None else as_inputs(unlabeled, augment)
        if isinstance(self.inputs, TensorInputs):
            self.inputs = self.inputs.on(self.runner.device)
        self.labels = _labels(labels, self.inputs)
        self._check_needs()
        self.round = 0
        self.memory: Mapping[str, Tensor] = {}
        self.members: tuple[Member, ...] = ()
        self.info: RoundInfo | None = None

    def _check_needs(self) -> None:
        """Refuse now what would fail only after all clients have trained."""
        if self.method.needs_rounds and self.rounds is None:
            raise SettingError(
                f"{self.method.title} with `distill_until` below 1 (as in the variant tuned) needs to know how many "
                "rounds there will be: give `rounds`"
            )
        if not self.method.needs_unlabeled(self.runner.module):
            return
        if self.inputs is None:
            raise SettingError(f"{self.method.title} needs unlabeled inputs at the server: give `unlabeled`")
        self.runner.trainable()
        self.method.check_classes(try_model(self.runner, self.inputs))

    def __repr__(self) -> str:
        inputs = "" if self.inputs is None else f", unlabeled={len(self.inputs)}"
        fixed = sum(tensor.numel() for tensor in self.runner.layout.frozen.values())
        frozen = f", frozen={fixed}" if fixed else ""
        return (
            f"{type(self).__name__}('{self.method.name}', parameters={self.runner.layout.size}{frozen}{inputs}, "
            f"seed={self.seed}, round={self.round})"
        )

    def aggregate(
        self, global_state: Mapping[str, Tensor] | ModelState, updates: Iterable[ClientUpdate]
    ) -> dict[str, Tensor]:
        """The next global `state_dict`, with the names of `global_state`. The arguments are not changed.

        Args:
            global_state: the `state_dict` that the clients started from, or the same as a packed `ModelState`. Frozen
                parameters may be left out, here and in the updates.
            updates: one ClientUpdate for each client, in any order. A broken one is set aside with a reason.

        Raises:
            AggregationError: if too few updates are usable or the result is not finite. The server is left unchanged.
        """
        if not isinstance(updates, Iterable):
            raise SettingError(f"`updates` must be an iterable of ClientUpdate, got {type(updates).__name__}")
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
            layout.packed(global_state, "`global_state`"),
            updates,
            self.memory,
            context,
            transforms=self.method.transforms,
            limits=self.limits,
            extras=self.method.extras,
        )
        state = layout.unpack(result.state)
        _check_range(state, layout.dtype)
        self.round += 1
        self.memory, self.members = result.memory, result.members
        self.info = RoundInfo(self.round, result.clients, result.set_aside, result.info, result.capped)
        if isinstance(global_state, ModelState):
            return state
        return {name: state[name] if name in state else global_state[name].clone() for name in global_state}

    @property
    def broadcast(self) -> dict[str, dict[str, Tensor]]:
        """What clients need next to the model, by name: SCAFFOLD's control variate, as named tensors."""
        layout = self.runner.layout
        return {
            name: {n: t.clone() for n, t in layout.unpack_params(self.memory[name]).items()}
            for name in self.method.extras
            if name in self.memory
        }

    def predict_proba(self, state: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """Probabilities [N, classes, …] of the model, or the vote of the members where the method keeps them.

        Args:
            state: a global `state_dict`, as `aggregate` returns it.
            inputs: as `unlabeled` of the constructor.
        """
        given = as_inputs(inputs, name="inputs")
        if self.members:
            return vote(self.members, local_predictor(self.runner, given), rule=self.method.vote_rule).probabilities
        return predict(self.runner, self.runner.layout.pack(state), given)

    def state_dict(self) -> dict[str, Any]:
        """All that the server keeps between rounds: plain numbers, texts and tensors, to save with any tool.

        Returns:
            method: the method's name. round: rounds done. memory: vectors by name (momentum, SCAFFOLD's c).
            members: the kept models, each with its name and its `state_dict` (1-Ensemble).

        Example:
            >>> server = Server("fedavg", nn.Linear(1, 2))
            >>> server.state_dict()
            {'method': 'fedavg', 'round': 0, 'memory': {}, 'members': []}
        """
        return {
            "method": self.method.name,
            "round": self.round,
            "memory": {name: vector.clone() for name, vector in self.memory.items()},
            "members": [{"name": m.name, "state": self.runner.layout.unpack(m.state)} for m in self.members],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the saved state of a server with the same method and model.

        Args:
            state: what `state_dict` returned.

        Raises:
            StateError: if it does not fit this server, with what differs. The server is left unchanged.
        """
        expected = {"method", "round", "memory", "members"}
        if not isinstance(state, Mapping) or set(state) != expected:
            received = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise StateError(f"a server's state must have the keys {sorted(expected)}, got {received}")
        if state["method"] != self.method.name:
            raise StateError(f"the state is of the method '{state['method']}', this server runs '{self.method.name}'")
        round = state["round"]
        if isinstance(round, bool) or not isinstance(round, int) or round < 0:
            raise StateError(f"`round` must be a whole number >= 0, got {round!r}")
        memory, members = self._checked_memory(state["memory"], round), self._checked_members(state["members"])
        keeps = any(stage.keeps_members for stage in self.method.stages)
        if bool(members) != (keeps and round > 0):
            raise StateError(
                f"{self.method.title} {'keeps' if keeps else 'does not keep'} members, and the state of round {round} "
                f"has {len(members)}: give what `state_dict` returned"
            )
        self.round, self.memory, self.members = round, memory, members

    def _checked_memory(self, memory: object, round: int) -> dict[str, Tensor]:
        if not isinstance(memory, Mapping):
            raise StateError(f"`memory` must be a mapping of names to tensors, got {type(memory).__name__}")
        layout = self.runner.layout
        sizes = {name: size for stage in self.method.stages for name, size in stage.memory_sizes(layout).items()}
        checked = {}
        for name, vector in memory.items():
            if name not in sizes:
                raise StateError(f"{self.method.title} keeps nothing called '{name}' between rounds")
            checked[name] = layout.check_vector(vector, sizes[name], f"`memory` '{name}'").clone()
            if not bool(torch.isfinite(checked[name]).all()):
                raise StateError(f"`memory` '{name}' has NaN or infinite values")
        for stage in self.method.stages:
            stage.check_memory(checked, round, layout)
        return checked

    def _checked_members(self, members: object) -> tuple[Member, ...]:
        if not isinstance(members, list) or not all(
            isinstance(m, Mapping) and set(m) == {"name", "state"} for m in members
        ):
            raise StateError("`members` must be a list of models, each with `name` and `state`")
        pack = self.runner.layout.packed
        packed = [Member(str(m["name"]), pack(m["state"], f"member '{m['name']}'")) for m in members]
        if broken := [m.name for m in packed if not m.state.finite()]:
            raise StateError(f"member '{broken[0]}' has NaN or infinite values")
        return tuple(packed)


def _method(method: str | Method, variant: str, settings: Mapping[str, Any]) -> Method:
    if isinstance(method, Method):
        if variant != DEFAULT_VARIANT:
            raise SettingError("`variant` works only with a method's name; a Method already has its settings")
        return method.with_settings(settings)
    if not isinstance(method, str):
        raise SettingError(f"`method` must be a name or a fedbe Method, got {type(method).__name__}")
    return get_method(method, variant, **settings)


def _check_range(state: Mapping[str, Tensor], checked: torch.dtype) -> None:
    """A float16 model can overflow when the result is converted back from the dtype in which it was checked."""
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.dtype != checked and not all_finite(tensor):
            raise AggregationError(
                f"the new '{name}' has values beyond the range of {tensor.dtype}: use a model in "
                "float32 or bfloat16; the global model is unchanged"
            )


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

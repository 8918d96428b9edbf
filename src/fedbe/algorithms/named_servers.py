"""`fedbe.FedBE(model, …)` and the other servers whose method is fixed by their class; `server` makes one by name."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from fedbe.algorithms.api import Server


class _NamedServer(Server):
    """A server whose method is fixed by its class. It has the arguments of `Server` and raises the same errors."""

    method_name: ClassVar[str]

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(self.method_name, model, **options)

    def __repr__(self) -> str:
        return super().__repr__().replace(f"'{self.method_name}', ", "", 1)


class FedAvg(_NamedServer):
    """The weighted average of the clients' weights: w̄ = Σ_i (n_i/n) w_i (Eq. 2).

    Args:
        model: the architecture.
        **options: those of `Server`, and the settings of the method:
            mean_weights (str, default "examples"): or "uniform", every client counts once.
            robust (str, default "none"): or "median", "trimmed", "krum", "geometric", "clip-median": hostile clients
            cannot move such a mean far.
            hostile_fraction (float, default 0.3): the part of the clients that may be hostile, for trimmed and krum.

    Raises:
        SettingError, ModelError: as `Server`.

    Example:
        >>> import fedbe, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> sizes = {1.0: 1, 5.0: 3}  # the weight that a client sends, and its number of examples
        >>> updates = [fedbe.ClientUpdate({"weight": torch.tensor([[w]])}, num_examples=n) for w, n in sizes.items()]
        >>> fedbe.FedAvg(model).aggregate(model.state_dict(), updates)
        {'weight': tensor([[4.]])}
    """

    method_name = "fedavg"


class FedAvgM(_NamedServer):
    """FedAvg with momentum at the server: m ← β m + (w̄ − w_last); the next model is w_last + m.

    Args:
        model: the architecture.
        **options: those of `FedAvg`, and:
            beta (float, default 0.9): β, in [0, 1).
            momentum_form (str, default "heavy-ball"): or "damped", "released" (see `Momentum`).

    Raises:
        SettingError, ModelError: as `Server`.

    Example:
        >>> import fedbe, torch
        >>> server = fedbe.FedAvgM(torch.nn.Linear(1, 1, bias=False), beta=0.5)
        >>> start, trained = ({"weight": torch.tensor([[w]])} for w in (0.0, 4.0))
        >>> state = server.aggregate(start, [fedbe.ClientUpdate(trained, num_examples=1)])
        >>> server.aggregate(state, [fedbe.ClientUpdate(state, num_examples=1)])  # no client moves, the momentum does
        {'weight': tensor([[6.]])}
    """

    method_name = "fedavgm"


class FedProx(_NamedServer):
    """FedAvg for clients that train with `fedbe.Prox`: their loss gains (μ/2)‖w − w̄‖². The server is FedAvg's.

    Args:
        model: the architecture.
        **options: those of `FedAvg`, and:
            proximal_mu (float, default 0.001): μ, for the clients' rule.
            prox_form (str, default "squared"): or "unsquared" (see `Prox`).

    Raises:
        SettingError, ModelError: as `Server`.

    Example:
        >>> import fedbe, torch
        >>> server = fedbe.FedProx(torch.nn.Linear(1, 1), proximal_mu=0.1)
        >>> server.method.rules  # for `fedbe.train(…, rules=…)`
        (Prox(proximal_mu=0.1, prox_form='squared'),)
    """

    method_name = "fedprox"


class Scaffold(_NamedServer):
    """SCAFFOLD: FedAvg, and c ← c + (1/N) Σ_i (c_i⁺ − c_i) over the clients of the round, N of all.

    Clients receive c as `server.broadcast`, train with `fedbe.ControlVariate` and send the extra "control", c_i⁺ − c_i.

    Args:
        model: the architecture.
        **options: those of `FedAvg`. `total_clients` (int, default: all reply in every round) is N.

    Raises:
        SettingError, ModelError: as `Server`.

    Example:
        >>> import fedbe, torch
        >>> server = fedbe.Scaffold(torch.nn.Linear(1, 1, bias=False), total_clients=10)
        >>> weight, change = {"weight": torch.zeros(1, 1)}, {"weight": torch.ones(1, 1)}
        >>> update = fedbe.ClientUpdate(weight, num_examples=1, extras={"control": change})
        >>> state = server.aggregate(weight, [update, update])
        >>> server.broadcast
        {'control': {'weight': tensor([[0.2000]])}}
    """

    method_name = "scaffold"


class VDistillation(_NamedServer):
    """The clients vote on `unlabeled`; their average learns the vote by SGD: p̂(x) = (1/N) Σ_i p(y | x, w_i).

    Args:
        model: the architecture.
        **options: those of `Server`; `unlabeled` (inputs [J, …]) is needed. The settings of the method are those of
            `EnsembleSettings` with members="C", and of `DistillSettings` with optimizer="sgd".

    Raises:
        SettingError, ModelError: as `Server`.

    Example:
        >>> import fedbe, torch
        >>> server = fedbe.VDistillation(torch.nn.Linear(4, 3), unlabeled=torch.zeros(8, 4), distill_epochs=5)
        >>> [server.method.settings()[name] for name in ("members", "optimizer", "distill_epochs")]
        ['C', 'sgd', 5]
    """

    method_name = "v-distillation"


class OneEnsemble(_NamedServer):
    """One round of long local training: p(y | x) = (1/N) Σ_i p(y | x, w_i), the clients' vote, is `predict_proba`.

    `aggregate` keeps the clients' models and returns their average.

    Args:
        model: the architecture.
        **options: those of `Server`, and the settings of `EnsembleSettings` with members="C".

    Raises:
        SettingError, ModelError: as `Server`.

    Example:
        >>> import fedbe, torch
        >>> model = torch.nn.Linear(1, 2, bias=False)
        >>> server = fedbe.OneEnsemble(model)
        >>> weights = [torch.tensor([[50.0], [0.0]]), torch.tensor([[0.0], [50.0]])]  # sure of class 0, sure of class 1
        >>> updates = [fedbe.ClientUpdate({"weight": weight}, num_examples=1) for weight in weights]
        >>> state = server.aggregate(model.state_dict(), updates)
        >>> server.predict_proba(state, torch.ones(1, 1))
        tensor([[0.5000, 0.5000]])
    """

    method_name = "1-ensemble"


class FedBE(_NamedServer):
    """Members vote on `unlabeled`; the average learns the vote p̂(x) = (1/|members|) Σ_w p(y | x, w) by SWA.

    Args:
        model: the architecture.
        **options: those of `Server`; `unlabeled` (inputs [J, …]) is needed. The settings of the method are those of
            `EnsembleSettings`, `DistillSettings` and `GateSettings`. `variant` (default "auto") sets their defaults;
            "paper" is FedBE as published: samples, average and clients vote.

    Raises:
        SettingError, ModelError: as `Server`.

    Example:
        >>> import fedbe, torch
        >>> inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        >>> server = fedbe.FedBE(torch.nn.Linear(4, 3), unlabeled=inputs, num_samples=5, members="SA")
        >>> server
        FedBE(parameters=15, unlabeled=8, seed=0, round=0)
    """

    method_name = "fedbe"


# The one list of classes with a method of their own. Flower's strategies are made from it, too.
SERVER_CLASSES: Mapping[str, type[_NamedServer]] = {
    cls.method_name: cls for cls in (FedAvg, FedAvgM, FedProx, Scaffold, VDistillation, OneEnsemble, FedBE)
}


def server(name: str, model: nn.Module, **options: Any) -> Server:
    """A server for any method of the catalogue, of the method's own class where there is one.

    Args:
        name: a name of `fedbe methods`, such as "fedbe" or "fedavg".
        model: the architecture.
        **options: those of `Server`, and settings of the method by name.

    Returns:
        A `FedBE` for "fedbe", and so on; a `Server` for a method without a class, such as "fedadam".

    Raises:
        SettingError: for an unknown name, option or setting.
        ModelError: for a model that cannot be copied, trained or run on `unlabeled`.

    Example:
        >>> import fedbe, torch
        >>> isinstance(fedbe.server("fedavg", torch.nn.Linear(1, 2)), fedbe.FedAvg)
        True
    """
    cls = SERVER_CLASSES.get(name) if isinstance(name, str) else None
    return Server(name, model, **options) if cls is None else cls(model, **options)

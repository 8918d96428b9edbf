"""Every method of the catalogue as a Flower strategy: one class, driven by the catalogue.

Sampling, guard, stages and report are those of the rest of the package: `aggregate_train` ends in
`fedbe.algorithms.server.step.server_step`, by way of `fedbe.Server`.
"""

import inspect
import time
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import Tensor, nn

from fedbe.algorithms.server.api import RoundInfo, server
from fedbe.algorithms.server.guard import SetAside, printable
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId, check_num_examples
from fedbe.errors import AggregationError, SettingError, StateError
from fedbe.experiment.run_state import RunState
from fedbe.flower import wire
from fedbe.flower.arrays import expected, read, split, to_record
from fedbe.flower.journal import Journal
from fedbe.flower.nodes import Nodes, sender
from fedbe.flower.replies import Replies, check_worked, comparable, weight_of

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
_FLOWERS = tuple(n for n in inspect.signature(FlowerFedAvg.__init__).parameters if n != "self")


class CatalogueStrategy(FlowerFedAvg):
    """A method of the catalogue in Flower.

    model      the architecture: a module, or a class or function that makes one
    folder     where each round's checkpoint and report go; needed by `fedbe.flower.resume`
    identify   ask nodes for their client ids before a part of them is sampled, so that the cohort is a function of
               (seed, round) and not of Flower's random node ids; the clients must be `fedbe.flower.client_app`s.
               Default: only where the method's clients have a memory (SCAFFOLD), which needs it
    arguments  those of Flower's FedAvg (fraction_train, min_train_nodes …) and of `fedbe.Server` (unlabeled, seed,
               min_clients … and the method's settings)
    """

    method_name = "fedbe"

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        folder: Path | str | None = None,
        identify: bool | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**{name: arguments.pop(name) for name in _FLOWERS if name in arguments})
        module = model if isinstance(model, nn.Module) or not callable(model) else model()
        self.server = server(self.method_name, module, **{"rounds": 1, **arguments})  # `play` knows how many there are
        self.method = self.server.method
        self.journal = Journal(folder, self.server)
        if identify is False and self.method.extras:
            raise SettingError(f"{self.method.title} must know whose memory is whose: `identify` cannot be False")
        self.identify = bool(self.method.extras) if identify is None else identify
        self._total = self.server.total_clients
        self._before = 0  # rounds that an earlier part of the run has played: Flower counts from 1 again
        self.nodes = Nodes()
        self._asked: tuple[list[Message], dict[str, Tensor], float] = ([], {}, 0.0)  # what was sent, global model, when
        self._evaluating: list[Message] = []

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Flower's `start`, from the first round."""
        others = {"timeout": timeout, "train_config": train_config, "evaluate_config": evaluate_config}
        with self.journal.held():
            self.journal.begin()
            self.restore(None)
            return self.play(grid, initial_arrays, num_rounds, evaluate_fn, **others)

    def play(
        self, grid: Grid, arrays: ArrayRecord, num_rounds: int, evaluate_fn: Evaluate | None, **others: Any
    ) -> Result:
        """Flower's loop, from where the server stands and with its round numbers; then the final model is written."""
        before, layout = self._before, self.server.runner.layout
        if self.method.one_round and before + num_rounds > 1:
            raise SettingError(f"{self.method.title} is defined for one round: set num_rounds to 1, got {num_rounds}")
        self.server.rounds = before + num_rounds

        def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None, "it is passed on only then"
            metrics = evaluate_fn(before + number, arrays)
            self.journal.note("server", before + number, metrics)
            return metrics

        if before and not self.journal.has("evaluate", before):  # it was stopped between a round and its evaluation
            asked = self.configure_evaluate(0, arrays, others.get("evaluate_config") or ConfigRecord(), grid)
            self.aggregate_evaluate(0, grid.send_and_receive(asked, timeout=others.get("timeout", 3600)))
        own = evaluate if evaluate_fn else None
        result = super().start(grid, arrays, num_rounds, evaluate_fn=own, **others)
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {before + number: record for number, record in getattr(result, name).items()})
        self.journal.finish(layout.pack(self._read(result.arrays or arrays)), layout)
        return result

    def restore(self, state: RunState | None) -> None:
        """Stand where a checkpoint stood, or at the beginning."""
        self.server.round = self._before = 0 if state is None else state.round
        self.server.memory = {} if state is None else state.memory
        self.server.members = () if state is None else state.members
        self.nodes = Nodes(None if state is None else state.clients)
        if state is not None:
            log(INFO, "%s: going on after round %s", self.method.title, state.round)

    def configure_train(
        self,
        server_round: int,  # noqa: ARG002
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """The round's cohort, a function of (seed, round), and what each of them is sent."""
        if self.fraction_train == 0:
            return []
        number = self.server.round + 1
        nodes = self._sample(grid, self.fraction_train, self.min_train_nodes, "cohort", number)
        previous = self._read(arrays)
        config["server-round"] = number
        plain = to_record(previous, self.server.broadcast)
        self._asked = ([self._message(node, plain, config, number) for node in nodes], previous, time.perf_counter())
        return self._asked[0]

    def _message(self, node: int, plain: ArrayRecord, config: ConfigRecord, number: int) -> Message:
        memory, owed = self.nodes.owed(node)
        named = {wire.MEMORY + n: self.server.runner.layout.unpack_params(t) for n, t in owed.items()}
        record = ArrayRecord({**plain, **to_record({}, named)}) if named else plain
        order = wire.Order(self.method, self.server.seed, number, memory, self.weighted_by_key)
        content = RecordDict({self.arrayrecord_key: record, self.configrecord_key: config, wire.RECORD: order.record()})
        return Message(content, dst_node_id=node, message_type=MessageType.TRAIN)

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next global model from the good replies; AggregationError if they are too few."""
        sent, previous, begin = self._asked
        if not sent:
            return None, None
        nodes, layout = [m.metadata.dst_node_id for m in sent], self.server.runner.layout
        came = Replies(replies, sent, self.nodes, self.method, layout, self.weighted_by_key)
        self.server.total_clients = self._total or self.nodes.count
        try:
            state = self.server.aggregate(previous, came)
        except AggregationError as error:
            raise AggregationError(f"round {self.server.round + 1}: {error}{_also(came.set_aside)}") from error
        used = {client: came.good[client] for client in self._info().clients}
        self.nodes.note({one.node: one.extras for one in used.values()})
        late = [SetAside(self.nodes.client(n), "it sent no reply in time") for n in nodes if n not in came.nodes]
        line = self._line([*came.set_aside, *late], time.perf_counter() - begin)
        metrics = self._metrics([(client, one.content) for client, one in used.items()], self.train_metrics_aggr_fn)
        self.journal.save(self._state(layout.pack(state)), line, metrics)
        return to_record(state), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Who evaluates is a function of (seed, round) too."""
        if self.fraction_evaluate == 0:
            return []
        number = self._before + server_round
        nodes = self._sample(grid, self.fraction_evaluate, self.min_evaluate_nodes, "evaluate", number)
        config["server-round"] = number
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        self._evaluating = [Message(content, dst_node_id=node, message_type=MessageType.EVALUATE) for node in nodes]
        return self._evaluating

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean of the good replies' metrics; a broken one is left out."""
        good = []
        for message in replies:
            client = self.nodes.client(sender(message, self._evaluating))
            try:
                check_worked(message)
                check_num_examples(weight_of(message.content, self.weighted_by_key))
            except StateError as error:
                log(WARNING, "evaluation of client %s is left out: %s", client, printable(str(error)))
            else:
                good.append((client, message.content))
        metrics = self._metrics(good, self.evaluate_metrics_aggr_fn)
        self.journal.note("evaluate", self._before + server_round, metrics)
        return metrics

    def _metrics(
        self,
        contents: list[tuple[ClientId, RecordDict]],
        average: Callable[[list[RecordDict], str], MetricRecord],
    ) -> MetricRecord | None:
        """Flower's own average needs numbers of one form; a user's function gets what came."""
        plain = average is aggregate_metricrecords
        chosen = comparable(contents) if plain else [content for _, content in contents]
        return average(chosen, self.weighted_by_key) if chosen else None

    def _read(self, arrays: ArrayRecord) -> dict[str, Tensor]:
        return read(split(arrays)[0], expected(self.server.runner.layout), "the global model")

    def _sample(self, grid: Grid, fraction: float, minimum: int, role: str, number: int) -> list[int]:
        """Nodes for one purpose in one round, drawn by our seeds."""
        online = self.nodes.wait(grid, max(self.min_available_nodes, minimum), self.journal.nodes)
        size = max(int(len(online) * fraction), minimum)
        if self.identify and (size < len(online) or self.method.extras):
            self.nodes.identify(grid, online)
        return self.nodes.sample(online, size, generator(self.server.seed, number, role))

    def _info(self) -> RoundInfo:
        assert self.server.info is not None, "there was a round"
        return self.server.info

    def _state(self, model: ModelState) -> RunState:
        return RunState(self.server.round, model, self.server.memory, self.nodes.memories, self.server.members)

    def _line(self, aside: list[SetAside], seconds: float) -> dict[str, Any]:
        info = self._info()
        qualities = {n: q.as_dict() for n in ("average", "ensemble", "student") if (q := getattr(info.step, n))}
        everybody = [*aside, *info.set_aside]
        for one in everybody:
            log(WARNING, "round %s: client %s is set aside: %s", info.round, one.client_id, one.reason)
        return {
            "round": info.round,
            "method": self.method.name,
            "clients": list(info.clients),
            "set_aside": [{"client": s.client_id, "reason": s.reason} for s in everybody],
            "server": qualities | ({} if info.step.disagreement is None else {"disagreement": info.step.disagreement}),
            "seconds": {**info.step.seconds, "round": seconds},
        }


def _also(aside: list[SetAside]) -> str:
    shown = "; ".join(f"client {s.client_id}: {s.reason}" for s in aside[:3])
    return f" Unreadable: {shown}{f'; and {len(aside) - 3} more' if len(aside) > 3 else ''}." if aside else ""


def strategy(name: str, model: nn.Module | Callable[[], nn.Module], **arguments: Any) -> CatalogueStrategy:
    """A strategy for any method of the catalogue: strategy("fedbe+scaffold", model=Net, unlabeled=images)."""
    made: type[CatalogueStrategy] = type(name, (CatalogueStrategy,), {"method_name": name})
    return made(model, **arguments)


class FedAvg(CatalogueStrategy):
    """The weighted average of the clients' weights, with our guard."""

    method_name = "fedavg"


class FedAvgM(CatalogueStrategy):
    """FedAvg with momentum at the server; settings: beta, momentum_form."""

    method_name = "fedavgm"


class FedProx(CatalogueStrategy):
    """FedProx; the clients are `fedbe.flower.client_app`s; settings: mu, prox_form."""

    method_name = "fedprox"


class Scaffold(CatalogueStrategy):
    """SCAFFOLD; the clients are `fedbe.flower.client_app`s."""

    method_name = "scaffold"


class VDistillation(CatalogueStrategy):
    """The clients vote on `unlabeled`; their average learns the vote by SGD."""

    method_name = "v-distillation"


class OneEnsemble(CatalogueStrategy):
    """One round; `strategy.server.predict` is the clients' vote."""

    method_name = "1-ensemble"


class FedBE(CatalogueStrategy):
    """Sampled models, the average and the clients vote on `unlabeled`; the average learns the vote by SWA."""

    method_name = "fedbe"

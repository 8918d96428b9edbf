"""Any method as a Flower strategy: one class for all methods.

Sampling, guard, stages and report are those of the rest of the package. `aggregate_train` calls `fedbe.Server`, which
calls `fedbe.algorithms.server.step.server_step`.
"""

import inspect
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from fedbe.algorithms.api import Server
from fedbe.algorithms.methods import get_method
from fedbe.algorithms.named_servers import server
from fedbe.algorithms.server.guard import SetAside, printable
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.core.updates import check_num_examples
from fedbe.errors import AggregationError, SettingError, StateError, check_settings
from fedbe.experiment.recorder import RunRecorder
from fedbe.experiment.run_state import RunState
from fedbe.flower import messages
from fedbe.flower.arrays import (
    frozen_arrays,
    is_positional,
    pack_state,
    split_extras,
    to_record,
    with_frozen,
    with_positions,
)
from fedbe.flower.nodes import NodeManager, log, sender
from fedbe.flower.privacy import check_wrapper
from fedbe.flower.replies import RoundReplies, average_metrics, check_no_error, describe_unreadable, num_examples

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]  # (round, global model) -> metrics
_FLOWER_ARGUMENTS = tuple(n for n in inspect.signature(FlowerFedAvg.__init__).parameters if n != "self")
_SERVER_ARGUMENTS = tuple(
    name for name, p in inspect.signature(Server.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY
)
_DRAWS = {"train": "cohort", "evaluate": "evaluate"}  # the role of the random numbers that sample the nodes
_RESULT_METRICS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class MethodStrategy(FlowerFedAvg):
    """A Flower strategy for one method. Use a subclass such as `fedbe.flower.FedBE`, or `fedbe.flower.strategy`.

    Args:
        model: the architecture: a module, or a class or function that makes one. It is copied, and its weights do
            not matter.
        folder: where checkpoints and reports are written; `fedbe.flower.resume` needs it. Default: none are.
        identify: whether to ask nodes for their client ids before a fraction of them is sampled. The cohort is then
            a function of (seed, round) and not of Flower's random node ids. Clients must be made by
            `fedbe.flower.client_app`. Default: only for methods whose clients have a memory (SCAFFOLD); these need it.
        arguments: the arguments of Flower's FedAvg (fraction_train, min_train_nodes …) and of `fedbe.Server`
            (unlabeled, seed, min_clients … and the method's settings).

    Attributes:
        method_name: the name of the method in `fedbe methods`.
        server: the `fedbe.Server` that aggregates; `server.info` describes the last round.
        method: the method with its settings.
        nodes: which client each node is, and the clients' memories.

    Raises:
        SettingError: an argument is unknown, missing or out of range.

    Example:
        >>> from fedbe.flower import FedAvg
        >>> FedAvg(model=nn.Linear(3, 2), fraction_train=0.5).fraction_train
        0.5
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
        settings = get_method(self.method_name).settings()
        owner = f"the strategy {type(self).__name__}"
        check_settings(owner, arguments, [*_FLOWER_ARGUMENTS, *_SERVER_ARGUMENTS, *settings])
        super().__init__(**{name: arguments.pop(name) for name in _FLOWER_ARGUMENTS if name in arguments})
        module = model if isinstance(model, nn.Module) or not callable(model) else model()
        self.server = server(self.method_name, module, **{"rounds": 1, **arguments})
        self.server.rounds = arguments.get("rounds")  # `run_rounds` sets it
        self.method = self.server.method
        self.recorder = RunRecorder(folder, self.server)
        if identify is False and self.method.extras:
            raise SettingError(
                f"`identify` must not be False for {self.method.title}: the server must know whose memory it sends"
            )
        self.identify = bool(self.method.extras) if identify is None else identify
        self.nodes = NodeManager()
        self._total_clients = self.server.total_clients
        self._first_round = 0  # rounds finished before this call of `start`: Flower counts from 1 again
        self._train_messages: list[Message] = []
        self._evaluate_messages: list[Message] = []
        self._previous: ModelState | None = None  # the global model of the current round
        self._frozen: dict[str, Array] = {}  # frozen parameters that the global model has: they travel, too
        self._positional = False  # whether the global model was received as a plain list of arrays
        self._round_start = 0.0

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run a federation from the first round. The arguments are those of Flower's `Strategy.start`.

        Raises:
            RunError: the strategy's folder contains another run.
            AggregationError: a round had fewer usable replies than `min_clients`.
        """
        options = {"timeout": timeout, "train_config": train_config, "evaluate_config": evaluate_config}
        with self.recorder.locked():
            self.recorder.start_new()
            self.restore(None)
            return self.run_rounds(grid, initial_arrays, num_rounds, evaluate_fn, **options)

    def run_rounds(
        self, grid: Grid, arrays: ArrayRecord, num_rounds: int, evaluate_fn: EvaluateFn | None, **options: Any
    ) -> Result:
        """Run Flower's loop for `num_rounds` more rounds, with continued round numbers, and write the final model."""
        first, layout = self._first_round, self.server.runner.layout
        if self.method.one_round and first + num_rounds > 1:
            raise SettingError(f"`num_rounds` must be 1, got {num_rounds}: {self.method.title} is for one round only")
        self.server.rounds = first + num_rounds

        def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None, "passed on only if it is given"
            metrics = evaluate_fn(first + number, arrays)
            self.recorder.add_metrics("server", first + number, metrics)
            return metrics

        if first and not self.recorder.has_metrics("evaluate", first):  # stopped between a round and its evaluation
            sent = self.configure_evaluate(0, arrays, options.get("evaluate_config") or ConfigRecord(), grid)
            self.aggregate_evaluate(0, grid.send_and_receive(sent, timeout=options.get("timeout", 3600)))
        result = super().start(grid, arrays, num_rounds, evaluate_fn=evaluate if evaluate_fn else None, **options)
        for name in _RESULT_METRICS:
            setattr(result, name, {first + number: record for number, record in getattr(result, name).items()})
        self.recorder.save_model(self._read_model(result.arrays or arrays), layout)
        return result

    def restore(self, state: RunState | None) -> None:
        """Continue from a checkpoint; None resets the strategy to the start.

        Raises:
            StateError: the checkpoint does not fit the strategy's method and model.
        """
        self._first_round = 0 if state is None else state.round
        self.recorder.restore(state)
        self.nodes = NodeManager(None if state is None else state.clients)
        if state is not None:
            log.info("%s: resuming after round %s", self.method.title, state.round)

    def configure_train(
        self,
        server_round: int,  # noqa: ARG002
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Sample the round's cohort, a function of (seed, round), and build its messages. Flower calls this.

        Raises:
            SettingError: the method needs something that `start`, which was bypassed, would have set; or a privacy
                wrapper of Flower calls, whose promise does not hold for this method.
        """
        if self.fraction_train == 0:
            return []
        self._check_caller()
        self.recorder.ensure_started()
        number = self.server.round + 1
        nodes = self._sample(grid, self.fraction_train, self.min_train_nodes, "train", number)
        self._previous, self._positional = self._read_model(arrays), is_positional(arrays, self.server.runner.layout)
        config[messages.ROUND] = number
        self._frozen = frozen_arrays(arrays, self.server.runner.layout)
        shared = ArrayRecord({**arrays, **to_record({}, self.server.broadcast)})
        self._train_messages = [self._train_message(node, shared, config, number) for node in nodes]
        self._round_start = time.perf_counter()
        return self._train_messages

    def _check_caller(self) -> None:
        if self.method.needs_rounds and self.server.rounds is None:
            raise SettingError(
                f"{self.method.title} with `distill_until` below 1 must know how many rounds there will be, and its "
                "`start` was not called: give the strategy `rounds`"
            )
        check_wrapper(self.method)

    def _train_message(self, node: int, shared: ArrayRecord, config: ConfigRecord, number: int) -> Message:
        source, memory = self.nodes.memory_for(node)
        unpacked = {
            messages.MEMORY_PREFIX + name: self.server.runner.layout.unpack_params(vector)
            for name, vector in memory.items()
        }
        record = ArrayRecord({**shared, **to_record({}, unpacked)}) if unpacked else shared
        instructions = messages.TrainInstructions(self.method, self.server.seed, number, source, self.weighted_by_key)
        content = RecordDict({self.arrayrecord_key: record, self.configrecord_key: instructions.add_to(config)})
        return Message(content, dst_node_id=node, message_type=MessageType.TRAIN)

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Compute the next global model from the valid replies. Flower calls this.

        Raises:
            AggregationError: fewer than `min_clients` replies are usable.
        """
        if not self._train_messages:
            return None, None
        layout = self.server.runner.layout
        received = RoundReplies(replies, self._train_messages, self.nodes, self.method, layout, self.weighted_by_key)
        received.log_count("aggregate_train")
        self.server.total_clients = self._total_clients or self.nodes.count
        assert self._previous is not None, "`configure_train` sets it"
        try:
            state = self.server.aggregate(self._previous, received)
        except AggregationError as error:
            unreadable = describe_unreadable(received.set_aside)
            raise AggregationError(f"round {self.server.round + 1}: {error}{unreadable}") from error
        record = with_frozen(to_record(state), self._frozen, layout)
        return with_positions(record) if self._positional else record, self._finish_round(state, received)

    def _finish_round(self, model: dict[str, Tensor], received: RoundReplies) -> MetricRecord | None:
        """Update the clients' memories, write the round to the folder, and average the metrics of training."""
        info = self.server.info
        assert info is not None, "`aggregate` sets it"
        used = {client: received.valid[client] for client in info.clients}
        self.nodes.update({reply.node: reply.extras for reply in used.values()})
        asked = [m.metadata.dst_node_id for m in self._train_messages]
        silent = [SetAside(self.nodes.client(n), "it sent no reply in time") for n in asked if n not in received.nodes]
        set_aside = [*received.set_aside, *silent, *info.set_aside]
        for one in set_aside:
            log.warning("round %s: client %s is set aside: %s", info.round, one.client_id, one.reason)
        for capped in info.capped:
            log.warning("round %s: %s (max_share, max_size_ratio)", info.round, capped)
        seconds = time.perf_counter() - self._round_start
        contents = [(client, reply.content) for client, reply in used.items()]
        metrics = average_metrics(contents, self.train_metrics_aggr_fn, self.weighted_by_key, self.server.limits)
        self.recorder.save_round(model, self.nodes.memories, set_aside, seconds, metrics)
        return metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the nodes that evaluate, a function of (seed, round), and build their messages. Flower calls this."""
        if self.fraction_evaluate == 0:
            return []
        number = self._first_round + server_round
        nodes = self._sample(grid, self.fraction_evaluate, self.min_evaluate_nodes, "evaluate", number)
        config[messages.ROUND] = number
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        self._evaluate_messages = [
            Message(content, dst_node_id=node, message_type=MessageType.EVALUATE) for node in nodes
        ]
        return self._evaluate_messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the metrics of the valid replies; a broken reply is left out. Flower calls this."""
        replies = list(replies)
        if replies:
            failed = sum(message.has_error() for message in replies)
            log.info("aggregate_evaluate: Received %s results and %s failures", len(replies) - failed, failed)
        valid = []
        for message in replies:
            client = self.nodes.client(sender(message, self._evaluate_messages))
            try:
                check_no_error(message)
                check_num_examples(num_examples(message.content, self.weighted_by_key))
            except StateError as error:
                log.warning("the evaluation of client %s is left out: %s", client, printable(str(error)))
            else:
                valid.append((client, message.content))
        metrics = average_metrics(valid, self.evaluate_metrics_aggr_fn, self.weighted_by_key, self.server.limits)
        self.recorder.add_metrics("evaluate", self._first_round + server_round, metrics)
        return metrics

    def initialize_parameters(self, client_manager: object) -> None:  # noqa: ARG002
        """Refuse the workflows of Flower's older API, which call this first."""
        raise SettingError(
            f"{self.method.title} cannot run in a workflow of Flower's older API such as SecAggPlusWorkflow: the "
            "server needs each client's model, and secure aggregation shows it only their sum; call `start`"
        )

    def _read_model(self, arrays: ArrayRecord) -> ModelState:
        return pack_state(split_extras(arrays)[0], self.server.runner.layout, "the global model")

    def _sample(self, grid: Grid, fraction: float, minimum: int, role: str, number: int) -> list[int]:
        """Nodes for one role in one round, drawn with the server's seed."""
        online = self.nodes.wait(grid, max(self.min_available_nodes, minimum), self.recorder.save_node_count)
        size = max(int(len(online) * fraction), minimum)
        if self.identify and (size < len(online) or self.method.extras):
            self.nodes.identify(grid, online)
        drawn = self.nodes.sample(online, size, generator(self.server.seed, number, _DRAWS[role]))
        log.info("configure_%s: Sampled %s nodes (out of %s)", role, len(drawn), len(online))
        return drawn

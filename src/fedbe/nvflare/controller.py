"""Any method as an NVFlare controller. Guard, stages and run folder are those of the rest of the package."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.base_fedavg import BaseFedAvg
from torch import Tensor, nn

from fedbe.algorithms.api import Server
from fedbe.algorithms.named_servers import server
from fedbe.algorithms.server.guard import SetAside
from fedbe.algorithms.server.limits import Limits
from fedbe.core import plugins
from fedbe.core.compute import server_threads
from fedbe.core.random import generator
from fedbe.core.updates import MAX_METRICS, ClientId, ClientUpdate, changed_memory, is_num_examples
from fedbe.errors import AggregationError, SettingError, StateError
from fedbe.experiment.recorder import RunRecorder
from fedbe.nvflare import messages

MAX_METRIC = 1e200  # times the weights of all clients it is still a float


class MethodController(BaseFedAvg):
    """A federation with one of fedbe's methods.

    All arguments are texts, numbers or mappings of these, because NVFlare writes them into the job's configuration and
    builds the controller from it.

    Args:
        method: a name of `fedbe methods`.
        model: module:name of a class or function in the job's code that makes the network. Its weights are the first
            global model, unless a persistor has one.
        unlabeled: module:name of a function that returns the server's inputs, for methods that distil.
        settings: options of `fedbe.Server` (seed, min_clients, total_clients …) and of the method (num_samples …).
        folder: a folder at the server for checkpoints and reports. A run that is there already is continued. Default:
            none are written.
        num_clients: how many clients train in a round, drawn as a function of (seed, round); 0 for all.
        num_rounds: the number of rounds of the whole run.
        timeout: seconds to wait for the clients in a round; 0 for no limit. Clients without a reply are set aside.
        persistor_id: the id of NVFlare's model persistor; "" for none.

    Raises:
        SettingError: an argument cannot work (when the job starts).
    """

    def __init__(
        self,
        method: str = "fedbe",
        model: str = "",
        unlabeled: str | None = None,
        settings: Mapping[str, Any] | None = None,
        folder: str | None = None,
        num_clients: int = 0,
        num_rounds: int = 5,
        timeout: int = 0,
        persistor_id: str = "",
    ) -> None:
        # A reply with an error is not the end of the run: the guard decides whether enough clients are left.
        super().__init__(
            num_clients=num_clients, num_rounds=num_rounds, persistor_id=persistor_id, ignore_result_error=True
        )
        # NVFlare reads the arguments from attributes of the same names.
        self.method, self.model, self.unlabeled, self.settings = method, model, unlabeled, settings
        self.folder, self.timeout, self.persistor_id = folder, timeout, persistor_id
        self.server: Server | None = None
        self._memories: dict[Any, Mapping[str, Tensor]] = {}

    def run(self) -> None:
        """Run all rounds. NVFlare calls this in the server's process."""
        module = _call("model", self.model)
        if not isinstance(module, nn.Module):
            raise SettingError(f"`model` must make a torch.nn.Module, got {type(module).__name__}")
        torch.set_num_threads(server_threads(module))  # the last bits of a distillation in whole batches depend on it
        inputs = {"unlabeled": _call("unlabeled", self.unlabeled)} if self.unlabeled else {}
        self.server = server(self.method, module, **{"rounds": self.num_rounds, **inputs, **(self.settings or {})})
        if self.server.method.one_round and self.num_rounds > 1:
            raise SettingError(f"`num_rounds` must be 1: {self.server.method.title} is for one round only")
        recorder = RunRecorder(self.folder, self.server)
        with recorder.locked():
            state = self._restore(recorder)
            state = self._first_model(module) if state is None else state
            while self.server.round < self.num_rounds and not self.abort_signal.triggered:
                state = self._run_round(self.server, state, recorder)
            if not self.abort_signal.triggered:
                recorder.save_model(self.server.runner.layout.pack(state), self.server.runner.layout)

    def _restore(self, recorder: RunRecorder) -> dict[str, Tensor] | None:
        """The global model of the last checkpoint, after the server and the clients' memories were restored."""
        assert self.server is not None, "`run` makes it"
        saved = recorder.load() if self.folder else None
        if saved is None:
            return None
        recorder.restore(saved)
        self._memories = dict(saved.clients)
        self.info(f"{self.server.method.title}: resuming after round {saved.round}")
        return self.server.runner.layout.unpack(saved.model)

    def _first_model(self, module: nn.Module) -> dict[str, Tensor]:
        assert self.server is not None, "`run` makes it"
        layout = self.server.runner.layout
        loaded = self.load_model().params if self.persistor else None
        state = messages.to_state(loaded, layout, "the persistor's model") if loaded else module.state_dict()
        return layout.unpack(layout.pack(state, "the first global model"))

    def _run_round(self, server: Server, state: dict[str, Tensor], recorder: RunRecorder) -> dict[str, Tensor]:
        begin, number = time.perf_counter(), server.round + 1
        self.current_round = number - 1  # NVFlare counts from 0
        cohort = self._cohort(server, number)
        results = self._train(server, state, cohort)
        if self.abort_signal.triggered:
            return state
        self.event(AppEventType.BEFORE_AGGREGATION)
        updates, unreadable = self._read(server, state, cohort, results)
        server.total_clients = server.total_clients or len(self.engine.get_clients())
        try:
            after = server.aggregate(state, updates)
        except AggregationError as error:
            reasons = "; ".join(f"{s.client_id}: {s.reason}" for s in unreadable[:3])
            raise AggregationError(f"round {number}: {error} {reasons}".strip()) from error
        info = server.info
        assert info is not None, "`aggregate` sets it"
        for one in (*unreadable, *info.set_aside):
            self.warning(f"round {number}: client {one.client_id} is set aside: {one.reason}")
        for capped in info.capped:
            self.warning(f"round {number}: {capped} (max_share, max_size_ratio)")
        by_client = {update.client_id: update for update in updates}
        self._remember({client: by_client[client].extras for client in info.clients})
        replies = [(c, by_client[c].num_examples, results[str(c)].metrics) for c in info.clients]
        metrics = average_metrics(replies, server.limits)
        self._publish(after, metrics)
        set_aside = (*unreadable, *info.set_aside)
        recorder.save_round(after, self._memories, set_aside, time.perf_counter() - begin, metrics)
        return after

    def _cohort(self, server: Server, number: int) -> list[str]:
        """The clients of a round: a function of (seed, round) and of who is there. NVFlare's own draw has no seed."""
        names = sorted((client.name for client in self.engine.get_clients()), key=natural_order)
        drawn = torch.randperm(len(names), generator=generator(server.seed, number, "cohort"))
        return [names[i] for i in sorted(drawn[: self.num_clients or len(names)].tolist())]

    def _train(self, server: Server, state: dict[str, Tensor], cohort: list[str]) -> dict[str, FLModel]:
        """Send each client its task and wait. Each gets its own: a client's memory is not for the others."""
        results: dict[str, FLModel] = {}
        layout = server.runner.layout
        params = messages.to_arrays(state)
        common = messages.instructions(server.method, server.seed, server.round + 1)
        common["broadcast"] = {n: server.memory[n].numpy() for n in server.method.extras if n in server.memory}
        for client in cohort:
            memory = {n: v.numpy() for n, v in self._memories.get(client, {}).items()}
            data = FLModel(
                params_type=ParamsType.FULL,
                params=params,
                current_round=self.current_round,
                total_rounds=self.num_rounds,
                meta={messages.META: {**common, "memory": memory}},
            )
            self.send_model(targets=[client], data=data, timeout=self.timeout, callback=_collector(results))
        self.info(f"round {server.round + 1}: {len(cohort)} clients train {layout.size} parameters")
        while self.get_num_standing_tasks() and not self.abort_signal.triggered:
            time.sleep(self._task_check_period)
        return results

    def _read(
        self, server: Server, state: dict[str, Tensor], cohort: list[str], results: Mapping[str, FLModel]
    ) -> tuple[list[ClientUpdate], list[SetAside]]:
        updates, unreadable = [], []
        for client in cohort:
            try:
                if client not in results:
                    raise StateError("it failed, or sent no reply in time")
                update = messages.read_update(results[client], client, server.method, server.runner.layout, state)
            except StateError as error:
                unreadable.append(SetAside(client, str(error)))
            else:
                updates.append(update)
        return updates, unreadable

    def _remember(self, extras: Mapping[Any, Mapping[str, Any]]) -> None:
        """Add the change that each used reply reports to the client's memory."""
        for client, changes in extras.items():
            if changes:
                self._memories[client] = changed_memory(self._memories.get(client, {}), changes)

    def _publish(self, state: dict[str, Tensor], metrics: dict[str, float] | None) -> None:
        """Tell NVFlare's other components of the new model, and save it with the persistor if there is one."""
        result = FLModel(
            params_type=ParamsType.FULL,
            params=messages.to_arrays(state),
            metrics=metrics,
            current_round=self.current_round,
            total_rounds=self.num_rounds,
            meta={},
        )
        self.fire_event_with_data(AppEventType.AFTER_AGGREGATION, self.fl_ctx, "aggregation_result", result)
        model = self.update_model(FLModel(params_type=ParamsType.FULL, params=result.params, meta={}), result)
        if self.persistor:
            self.save_model(model)


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts site-2 before site-10.

    Example:
        >>> sorted(["site-10", "site-2"], key=natural_order)
        ['site-2', 'site-10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _collector(results: dict[str, FLModel]) -> Any:
    def collect(result: FLModel) -> None:
        results[str((result.meta or {}).get("client_name"))] = result

    return collect


def _call(what: str, path: str) -> Any:
    """Call a function of the job's code. A job is code that the server runs, so its modules are trusted."""
    if ":" not in path:
        raise SettingError(f"`{what}` must be module:name of a function in the job's code, got '{path}'")
    plugins.trust()
    return plugins.load_function(path, SettingError)()


def average_metrics(replies: Sequence[tuple[ClientId, Any, Any]], limits: Limits) -> dict[str, float] | None:
    """The mean of each metric over the clients that report it, weighted as their updates are.

    Args:
        replies: client, reported number of examples, and metrics.
        limits: decide how much a client counts.

    Returns:
        The means by name; None if there are none. Values that are not finite numbers of a sensible size are left out,
        and so is a client that reports more than MAX_METRICS.
    """
    sums: dict[str, tuple[float, float]] = {}
    valid = [(client, examples, metrics) for client, examples, metrics in replies if is_num_examples(examples)]
    counted = limits.counted([(client, float(examples)) for client, examples, _ in valid])
    for weight, (_, _, metrics) in zip(counted, valid, strict=True):
        readable = isinstance(metrics, Mapping) and len(metrics) <= MAX_METRICS
        for name, value in metrics.items() if weight and readable else ():
            if isinstance(value, int | float) and abs(value) <= MAX_METRIC:
                total, weights = sums.get(str(name), (0.0, 0.0))
                sums[str(name)] = (total + weight * value, weights + weight)
    return {name: total / weights for name, (total, weights) in sums.items()} or None

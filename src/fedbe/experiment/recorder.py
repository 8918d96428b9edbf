"""The run folder of Flower and NVFlare: a checkpoint and a line of report for each round, and the final model.

FOLDER/checkpoint-*.safetensors   all that crosses a round: model, server memory, the clients' memories
FOLDER/rounds.jsonl               one line a round: who took part, who was set aside and why, how long it took
FOLDER/model.safetensors          the final weights under the module's own names
FOLDER/report.json                the metrics of each round: training, evaluation by clients, evaluation by the server
FOLDER/nodes.json                 only if there were too few nodes: how many are online and how many are needed
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbe.algorithms.api import Server
from fedbe.algorithms.round_info import RoundInfo
from fedbe.algorithms.server.guard import SetAside
from fedbe.core.compute import torch_release
from fedbe.core.files import locked, make_folder, write_json
from fedbe.core.layout import Layout
from fedbe.core.state import ModelState
from fedbe.core.updates import ClientId
from fedbe.errors import RunError
from fedbe.experiment import checkpoint, run_folder
from fedbe.experiment.provenance import numerics
from fedbe.experiment.records import clients_record
from fedbe.experiment.run_state import RunState

REPORT_FILE = "report.json"
NODES_FILE = "nodes.json"
METRIC_KINDS = ("train", "evaluate", "server")


class RunRecorder:
    """Writes and reads one run folder. Without a folder (None) it records nothing."""

    def __init__(self, folder: Path | str | None, server: Server) -> None:
        self.folder = None if folder is None else Path(folder)
        self._server = server
        self._started = False
        self._own_lock = ExitStack()  # until the process ends, if another loop than `start` runs the rounds

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder while a run is in progress. BusyError if another process holds the lock."""
        self._started = True
        if self.folder is None:
            yield
            return
        make_folder(self.folder)
        with locked(self.folder):
            yield

    def ensure_started(self) -> None:
        """Start a new run, unless `start` or `resume` did: a subclass or a wrapper may have its own loop."""
        if not self._started:
            self._own_lock.enter_context(self.locked())
            self.start_new()

    def start_new(self) -> None:
        """Check that the folder has no other run. Files of a run that ended in its first round are removed."""
        if self.folder is None:
            return
        if checkpoint.paths(self.folder) or (self.folder / run_folder.MODEL_FILE).exists():
            raise RunError(
                f"{self.folder} contains another run: continue it with fedbe.flower.resume, or choose another folder"
            )
        for name in (run_folder.ROUNDS_FILE, REPORT_FILE):
            (self.folder / name).unlink(missing_ok=True)

    def load(self) -> RunState | None:
        """The last finished round; None if there is none. Lines and metrics of later rounds are removed."""
        if self.folder is None:
            raise RunError("there is nothing to resume from: give the strategy a `folder`")
        state = checkpoint.latest(self.folder, _identity(self._server))
        last_round = 0 if state is None else state.round
        report = {
            kind: {number: metrics for number, metrics in by_round.items() if int(number) <= last_round}
            for kind, by_round in self._read_report().items()
        }
        run_folder.drop_rounds_after(self.folder, last_round)  # first: it refuses a folder that is not consistent
        write_json(self.folder / REPORT_FILE, report)
        return state

    def restore(self, state: RunState | None) -> None:
        """Let the server continue from a checkpoint; None resets it to the start. StateError if it does not fit."""
        round, memory, members = (0, {}, ()) if state is None else (state.round, state.memory, state.members)
        saved = {"round": round, "memory": memory, "members": [{"name": m.name, "state": m.state} for m in members]}
        self._server.load_state_dict({"method": self._server.method.name, **saved})

    def save_round(
        self,
        model: Mapping[str, Tensor],
        clients: Mapping[ClientId, Mapping[str, Tensor]],
        set_aside: Iterable[SetAside],
        seconds: float,
        metrics: Mapping[str, Any] | None,
    ) -> None:
        """Write the round that the server has just aggregated. The checkpoint is written last: it completes the round.

        Args:
            model: The next global model.
            clients: The clients' memories.
            set_aside: All whose update was not used.
            seconds: How long the round took.
            metrics: Of the clients' training; None for none.
        """
        server, info = self._server, self._server.info
        if self.folder is None:
            return
        assert info is not None, "`aggregate` sets it"
        run_folder.append_round(self.folder, _round_line(info, server.method.name, set_aside, seconds))
        self.add_metrics("train", info.round, metrics)
        state = RunState(info.round, server.runner.layout.pack(model), server.memory, clients, server.members)
        checkpoint.save(self.folder, state, _identity(server))

    def save_node_count(self, online: int, needed: int) -> None:
        """Write nodes.json, so that `fedbe flower run` can show what the server waits for."""
        if self.folder is not None:
            write_json(self.folder / NODES_FILE, {"online": online, "needed": needed})

    def add_metrics(self, kind: str, round: int, metrics: Mapping[str, Any] | None) -> None:
        """Add metrics to report.json at once, so that a stopped run keeps them."""
        if self.folder is not None and metrics is not None:
            report = self._read_report()
            report[kind][str(round)] = dict(metrics)
            write_json(self.folder / REPORT_FILE, report)

    def has_metrics(self, kind: str, round: int) -> bool:
        """Whether report.json has metrics of this kind for the round."""
        return self.folder is not None and str(round) in self._read_report()[kind]

    def save_model(self, model: ModelState, layout: Layout) -> None:
        """Write the final model, and a report even if there were no metrics."""
        if self.folder is not None:
            run_folder.write_model(self.folder, None, layout.with_frozen(layout.unpack(model)))
            write_json(self.folder / REPORT_FILE, self._read_report())

    def _read_report(self) -> dict[str, dict[str, Any]]:
        assert self.folder is not None, "callers check for a folder"
        path = self.folder / REPORT_FILE
        try:
            report = dict(json.loads(path.read_text())) if path.exists() else {}
            kinds: dict[str, dict[str, Any]] = {kind: dict(report.get(kind, {})) for kind in METRIC_KINDS}
            if not all(re.fullmatch("[0-9]{1,9}", number) for by_round in kinds.values() for number in by_round):
                raise ValueError("rounds must be whole numbers")
            json.dumps(report, ensure_ascii=False).encode()  # half a surrogate pair cannot be written or printed
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(
                f"{path} is damaged: restore it from a copy, or remove it and lose earlier metrics"
            ) from error
        return kinds


def _round_line(info: RoundInfo, method: str, set_aside: Iterable[SetAside], seconds: float) -> dict[str, Any]:
    """The line of a round in rounds.jsonl."""
    return {
        "round": info.round,
        "method": method,
        **clients_record(info.clients, set_aside, info.capped),
        "server": info.step.as_record(),
        "seconds": {**info.step.seconds, "round": seconds},
    }


def read_node_count(folder: Path) -> tuple[int, int] | None:
    """How many nodes are online and how many are needed; None if the server did not have to wait for nodes."""
    path = folder / NODES_FILE
    if not path.exists():
        return None
    try:
        count = json.loads(path.read_text())
        return int(count["online"]), int(count["needed"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # it is only for a message
        return None


def _jsonable(value: Any) -> Any:
    """A setting for JSON, which cannot sort a mapping whose keys are numbers and texts (alpha by client id)."""
    return sorted(map(repr, value.items())) if isinstance(value, Mapping) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def _identity(server: Server) -> dict[str, str]:
    """What must not change when a run is resumed."""
    layout = server.runner.layout
    shapes = [[(s.name, list(s.shape), str(s.dtype)) for s in part] for part in (layout.params, layout.buffers)]
    counters = [(name, list(shape), str(dtype)) for name, (shape, dtype) in layout.counters.items()]
    settings = {name: _jsonable(value) for name, value in sorted(server.method.settings().items())}
    identity = {
        "method": server.method.name,
        "settings": _digest(settings),
        "seed": str(server.seed),
        "model": _digest([shapes, counters, layout.keys]),
        "unlabeled inputs": str(0 if server.inputs is None else len(server.inputs)),
        "numerics": numerics(server.variant == "released"),
        "torch": torch_release(torch.__version__),
    }
    if server.method.needs_rounds:  # the number of rounds decides which rounds distil
        identity["number of rounds"] = str(server.rounds)
    return identity

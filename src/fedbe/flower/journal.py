"""The folder of a federation's run: a checkpoint and a line of report each round, the model at the end.

FOLDER/checkpoint-*.safetensors   all that crosses a round: model, server memory, the clients' memories
FOLDER/rounds.jsonl               one line a round: who took part, who was set aside and why, how long it took
FOLDER/model.safetensors          the final weights under the module's own names
FOLDER/report.json                the metrics of each round: of training, of the clients' evaluation, of the server's
FOLDER/nodes.json                 only if there were too few nodes: how many are online and how many are needed
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from flwr.app import MetricRecord

import fedbe
from fedbe.algorithms.server.api import Server
from fedbe.core.files import append_line, locked, make_folder, write_atomic, write_json
from fedbe.core.state import Layout, ModelState
from fedbe.errors import RunError
from fedbe.experiment import checkpoint
from fedbe.experiment.run_state import RunState


class Journal:
    """Writes and reads one folder; with None it remembers nothing."""

    def __init__(self, folder: Path | str | None, server: Server) -> None:
        self.folder = None if folder is None else Path(folder)
        self._server = server

    @contextmanager
    def held(self) -> Iterator[None]:
        """While a run goes on, its folder is nobody else's."""
        if self.folder is None:
            yield
            return
        make_folder(self.folder)
        with locked(self.folder):
            yield

    def begin(self) -> None:
        """A new run must not mix with an old one. What one left that ended in its first round goes."""
        if self.folder is None:
            return
        if checkpoint.paths(self.folder) or (self.folder / "model.safetensors").exists():
            raise RunError(f"{self.folder} holds another run: go on with fedbe.flower.resume, or choose another folder")
        for name in ("rounds.jsonl", "report.json"):
            (self.folder / name).unlink(missing_ok=True)

    def load(self) -> RunState | None:
        """The last finished round, if there is one; lines and metrics of later rounds are dropped."""
        if self.folder is None:
            raise RunError("there is nothing to resume from: give the strategy a `folder`")
        state = checkpoint.latest(self.folder, _identity(self._server))
        done = 0 if state is None else state.round
        report = {kind: {n: m for n, m in found.items() if int(n) <= done} for kind, found in self._report().items()}
        write_json(self.folder / "report.json", report)
        path = self.folder / "rounds.jsonl"
        if path.exists():
            kept = [line for line in path.read_bytes().splitlines(keepends=True) if _round(line) <= done]
            write_atomic(path, b"".join(kept))
        return state

    def save(self, state: RunState, line: dict[str, Any], metrics: MetricRecord | None) -> None:
        """A finished round. The checkpoint comes last: it says that the rest is there."""
        if self.folder is not None:
            append_line(self.folder / "rounds.jsonl", line)
            self.note("train", state.round, metrics)
            checkpoint.save(self.folder, state, _identity(self._server))

    def nodes(self, online: int, needed: int) -> None:
        """For who follows the run: the server waits, or has waited, for nodes."""
        if self.folder is not None:
            write_json(self.folder / "nodes.json", {"online": online, "needed": needed})

    def note(self, kind: str, round: int, metrics: MetricRecord | None) -> None:
        """Metrics go into the report at once, so that a run that is stopped keeps them."""
        if self.folder is not None and metrics is not None:
            report = self._report()
            report[kind][str(round)] = dict(metrics)
            write_json(self.folder / "report.json", report)

    def has(self, kind: str, round: int) -> bool:
        return self.folder is not None and str(round) in self._report()[kind]

    def finish(self, model: ModelState, layout: Layout) -> None:
        """The final model, and a report even if there were no metrics."""
        if self.folder is not None:
            named = {n: t.contiguous().clone() for n, t in layout.unpack(model).items()}
            write_atomic(self.folder / "model.safetensors", safetensors.torch.save(named))
            write_json(self.folder / "report.json", self._report())

    def _report(self) -> dict[str, dict[str, Any]]:
        assert self.folder is not None, "asked for with a folder only"
        path = self.folder / "report.json"
        try:
            found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        except ValueError as error:
            raise RunError(f"{path} is damaged: mend it from a copy, or remove it and lose earlier metrics") from error
        return {kind: found.get(kind, {}) for kind in ("train", "evaluate", "server")}


def _round(line: bytes) -> float:
    """The round of a line; one that a crash cut off belongs to no finished round."""
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _ordered(value: Any) -> Any:
    """A setting as JSON; a mapping (alpha by client id, whole numbers and texts) in an order of its own."""
    return sorted(map(repr, value.items())) if isinstance(value, Mapping) else value


def _identity(server: Server) -> dict[str, str]:
    """What must be the same to go on."""
    layout = server.runner.layout
    shapes = [[(s.name, list(s.shape), str(s.dtype)) for s in part] for part in (layout.params, layout.buffers)]
    counters = [(name, list(shape), str(dtype)) for name, (shape, dtype) in layout.counters.items()]
    model = json.dumps([shapes, counters, layout.keys])
    ordered = {name: _ordered(value) for name, value in sorted(server.method.settings().items())}
    settings = json.dumps(ordered, default=str)
    return {
        "method": server.method.name,
        "settings": hashlib.sha256(settings.encode()).hexdigest()[:16],
        "seed": str(server.seed),
        "model": hashlib.sha256(model.encode()).hexdigest()[:16],
        "unlabeled inputs": str(0 if server.inputs is None else len(server.inputs)),
        "fedbe": fedbe.__version__,
        "torch": torch.__version__,
        # Where only a share of the rounds distils, another number of rounds would be another training.
        **({"number of rounds": str(server.rounds)} if server.method.needs_rounds else {}),
    }

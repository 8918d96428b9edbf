"""Break things on purpose, with seeds: kills, failing disks, damaged files, hostile replies. Prints a table.

    python -m benchmarks.chaos [--kills 500] [--writes 300] [--inputs 200000] [--replies 3000] [--seed 0]

For each kind: how often it was tried; how often all was well (a clean result or one sentence); how often a result
differed from the undisturbed one or was lost; how often an error was raw. The last three must be 0.
"""

import argparse
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from fedbe import ClientUpdate, Server, data, report
from fedbe.algorithms.methods import METHODS
from fedbe.core import files
from fedbe.errors import FedBEError
from fedbe.experiment import checkpoint, loop, run_folder, saved_model
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.recipe_files import load_recipe

RECIPE = (
    "training.rounds=2", "training.epochs=1", "training.one_round_epochs=1", "split.clients=3", "model.hidden=[8]",
    "settings.distill_epochs=1", "settings.num_samples=2", "evaluation.ensemble=", "evaluation.clients=false",
)  # fmt: skip


@dataclass
class Tally:
    """What became of the trials of one kind."""

    tried: int = 0
    differing: int = 0
    lost: int = 0
    raw: int = 0

    def row(self, name: str) -> str:
        good = self.tried - self.differing - self.lost - self.raw
        return f"| {name} | {self.tried:,} | {good:,} | {self.differing} | {self.lost} | {self.raw} |"


def new_run(folder: Path, method: str) -> Path:
    """A small run folder, not trained yet."""
    return run_folder.create(folder, load_recipe("digits", RECIPE), method, 0, "float32")


def train(folder: Path) -> None:
    """Train a run to its end in this process."""
    with Serial() as executor:
        loop.execute(folder, executor, Callback())


def same(a: Path, b: Path) -> bool:
    """Whether two finished runs have the same model and last checkpoint, bit for bit."""
    names = ["model.safetensors", checkpoint.paths(a)[0].name]
    return all((b / name).exists() and (a / name).read_bytes() == (b / name).read_bytes() for name in names)


def kills(count: int, draw: random.Random, root: Path) -> Tally:
    """Kill a run at random moments until it is finished: every method in turn."""
    tally, methods = Tally(), list(METHODS)
    references: dict[str, tuple[Path, float]] = {}
    while tally.tried < count:
        method = methods[tally.tried % len(methods)]
        if method not in references:
            reference, begin = new_run(root / f"reference-{method}", method), time.perf_counter()
            train(reference)
            references[method] = reference, time.perf_counter() - begin
        reference, seconds = references[method]
        folder = new_run(root / "killed", method)
        for _ in range(3):
            tally.tried += 1
            child = os.fork()
            if not child:
                _quiet_child(folder)
            time.sleep(draw.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        try:
            train(folder)
            tally.differing += not same(reference, folder)
        except FedBEError:
            tally.lost += 1
        except Exception:
            tally.raw += 1
            traceback.print_exc()
        shutil.rmtree(folder)
    return tally


def _quiet_child(folder: Path) -> None:
    try:
        train(folder)
    finally:
        os._exit(0)


@contextmanager
def failing(at: int) -> Iterator[None]:
    """The n-th write, sync or rename fails, as on a full disk."""
    calls = 0
    real_fsync, real_replace, real_write = os.fsync, Path.replace, files._write

    def step() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def fsync(handle: int) -> None:
        step()
        real_fsync(handle)

    def replace(path: Path, target: Path) -> Path:
        step()
        return real_replace(path, target)

    def write(file: IO[bytes], content: bytes) -> None:
        if calls + 1 == at:  # half of it is on the disk
            file.write(content[: len(content) // 2])
            file.flush()
        step()
        real_write(file, content)

    os.fsync, Path.replace, files._write = fsync, replace, write  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        os.fsync, Path.replace, files._write = real_fsync, real_replace, real_write  # type: ignore[method-assign]


def full_disks(count: int, root: Path) -> Tally:
    """The n-th write of a run fails, for every n; then the run is resumed."""
    tally, methods = Tally(), ["fedavg", "fedbe+scaffold", "1-ensemble", "fedavgm"]
    for method in methods:
        reference = new_run(root / f"full-{method}", method)
        train(reference)
        for at in range(1, count // len(methods) + 1):
            tally.tried += 1
            folder = new_run(root / "full", method)
            try:
                with failing(at):
                    train(folder)
            except FedBEError:
                pass
            except Exception:
                tally.raw += 1
                traceback.print_exc()
            try:
                train(folder)
                tally.differing += not same(reference, folder)
            except FedBEError:
                tally.lost += 1
            shutil.rmtree(folder)
    return tally


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content with a few random changes: flipped, zeroed, removed, repeated or inserted bytes."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed)) if changed else 0
        kind = draw.randrange(6)
        if kind == 0 and changed:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[at : at + draw.randint(1, 40)] = b""
        elif kind == 2:
            changed[at:at] = draw.randbytes(draw.randint(1, 8))
        elif kind == 3:
            changed[at:at] = changed[at : at + draw.randint(1, 60)]
        elif kind == 4:
            changed[at : at + 4] = draw.choice(
                [b"null", b"1e99", b"[[[[", b'{"a"', b"-1  ", b"\xff\xff\xff\xff", b"true"]
            )
        else:
            del changed[at:]
    return bytes(changed)


def readers(root: Path) -> dict[str, tuple[Path, Callable[[], object]]]:
    """Every reader of a file: the file that is damaged, and what reads it."""
    run = root / "reference-fedavg"
    npz, zipped, toml = root / "a.npz", root / "a.zip", root / "a.toml"
    np.savez_compressed(npz, inputs=np.random.default_rng(0).random((40, 6)), labels=np.arange(40) % 4)
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("data_batch_1", b"x" * 500)
    toml.write_bytes((run / "recipe.toml").read_bytes())
    last = checkpoint.paths(run)[0]
    return {
        "checkpoint": (last, lambda: checkpoint.latest(run)),
        "model": (run / "model.safetensors", lambda: saved_model.load_trained_model(run)),
        "rounds.jsonl": (run / "rounds.jsonl", lambda: report.build_sections(report.read_groups([run]))),
        "run.json": (run / "run.json", lambda: report.build_sections(report.read_groups([run]))),
        "recipe": (toml, lambda: load_recipe(toml)),
        ".npz": (npz, lambda: data.load_task(f"npz:{npz}")),
        "archive": (zipped, lambda: data.load_task(f"cifar10:{zipped}")),
    }


def fuzz(count: int, draw: random.Random, root: Path) -> dict[str, Tally]:
    """Read damaged files: a clean result or one sentence. Numbers of damaged tensors must never be used."""
    tallies = {}
    share = {"rounds.jsonl": 40, "run.json": 40}  # these draw a whole report
    for name, (path, read) in readers(root).items():
        tally, original = Tally(), path.read_bytes()
        tensors = path.suffix == ".safetensors"
        model = checkpoint.read(path).model.params if name == "checkpoint" else None
        for _ in range(max(1, count // 7 // share.get(name, 1))):
            tally.tried += 1
            path.write_bytes(mutated(original, draw))
            try:
                result = read()
                if tensors and model is not None and result.round == 2:  # type: ignore[attr-defined]
                    tally.differing += not torch.equal(result.model.params, model)  # type: ignore[attr-defined]
            except FedBEError:
                pass
            except Exception:
                tally.raw += 1
                traceback.print_exc()
        path.write_bytes(original)
        tallies[f"damaged {name}"] = tally
    return tallies


def hostile_replies(count: int, draw: random.Random) -> Tally:
    """One of five clients sends anything: the result is that of the others, or near it."""
    tally = Tally()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    start = module.state_dict()
    honest = [{k: v + 0.01 * i if v.is_floating_point() else v for k, v in start.items()} for i in range(4)]
    updates = [ClientUpdate(s, 10, i) for i, s in enumerate(honest)]
    clean = Server("fedavg", module).aggregate(start, updates)
    odd: list[object] = [
        None,
        3,
        "x",
        [],
        {},
        float("nan"),
        1e15,
        -1,
        2**70,
        torch.zeros(2),
        np.float16("inf"),
        b"x",
        True,
    ]
    for _ in range(count):
        tally.tried += 1
        state: dict[Any, object] = dict(start)
        name = draw.choice(list(start))
        values = (
            [torch.full_like(start[name], v) for v in (3e38, 1e9, -1e30)] if start[name].is_floating_point() else []
        )
        state[draw.choice([name, name, "extra", 7])] = draw.choice([*odd, *values])
        update = ClientUpdate(state, draw.choice([10, *odd]), draw.choice([4, *odd]))  # type: ignore[arg-type]
        try:
            result = Server("fedavg", module).aggregate(start, [*updates, update])
        except FedBEError:
            tally.lost += 1
            continue
        except Exception:
            tally.raw += 1
            traceback.print_exc()
            continue
        tally.differing += any(
            not torch.allclose(result[k].double(), clean[k].double(), atol=100) for k in clean if k in start
        )
    return tally


def main(arguments: list[str]) -> int:
    """Run everything and print the table. Returns 1 if anything was lost, differed or was raw."""
    parser = argparse.ArgumentParser(prog="chaos")
    for name, default in (("kills", 500), ("writes", 300), ("inputs", 200_000), ("replies", 3000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        root, draw = Path(folder), random.Random(options.seed)
        train(new_run(root / "reference-fedavg", "fedavg"))
        shutil.copytree(root / "reference-fedavg", root / "fuzz" / "reference-fedavg")
        rows = {
            f"SIGKILL at a random moment, {len(METHODS)} methods": kills(options.kills, draw, root / "kills"),
            "the n-th write, sync or rename fails": full_disks(options.writes, root / "disks"),
            **fuzz(options.inputs, draw, root / "fuzz"),
            "hostile replies": hostile_replies(options.replies, draw),
        }
    print(f"seed {options.seed}; {json.dumps({k: v for k, v in vars(options).items() if k != 'seed'})}\n")
    print("| what | tried | well | differing | lost | raw errors |\n|---|---|---|---|---|---|")
    for name, tally in rows.items():
        print(tally.row(name))
    return int(any(t.differing or t.lost or t.raw for t in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

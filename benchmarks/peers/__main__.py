"""Run both jobs with fedbe, with its peers and without a simulator, in turn; write a table and a picture.

    python -m benchmarks.peers [--turns 3] [--jobs paper,pfl] [--peers pfl,flwr] [--environments .peers] [--out FOLDER]

CIFAR-10 is read from FEDBE_DATA. Missing environments are installed first; a peer that cannot be installed, or that
fails, is left out and named. All measurements are added to `peers.jsonl`
in the folder `--out`, and the table and the picture are made of everything in it: several short calls make one table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bench_round import CORES, attainable_seconds
from benchmarks.machine import describe_machine
from benchmarks.peers.install import PEERS, install
from benchmarks.peers.job import JOBS, Job

ROOT = Path(__file__).parents[2]
REFERENCE = "attainable"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
Measured = dict[str, Any]


def write_data(path: Path) -> None:
    """CIFAR-10 as all drivers read it: the training images in random order, the test images."""
    from fedbe.data.sources import load_task

    task = load_task("cifar10")
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(0))
    train = (task.train.tensor[order], task.train.labels[order])
    torch.save({"train": train, "test": (task.test.tensor, task.test.labels)}, path)


def command(peer: str, environments: Path) -> list[str]:
    """How a user starts a module with this peer."""
    if peer == "fedbe":
        return [sys.executable, "-m"]
    programs = environments / peer / "bin"
    if peer == "pfl":
        return [str(programs / "torchrun"), "--standalone", f"--nproc_per_node={CORES}", "-m"]
    return [str(programs / "python"), "-m"]


class Memory(threading.Thread):
    """Watches the resident memory of a process and all its descendants, summed, in MB."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.ended = pid, 0.0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.5):
            self.peak = max(self.peak, sum(map(_resident_mb, _family(self.pid))))


def _family(pid: int) -> list[int]:
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # it has ended
        return []
    return [pid, *(member for child in " ".join(lists).split() for member in _family(int(child)))]


def _resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


def drive(peer: str, job: Job, data: Path, environments: Path) -> Measured:
    """Run a job with a peer. Seconds of a round are those after the first; start-up is the first less one of them."""
    arguments = [*command(peer, environments), f"benchmarks.peers.{peer}_driver", job.name, str(data)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")] if peer == "fedbe" else [str(ROOT)])
    environment = os.environ | QUIET | {"PYTHONPATH": paths}
    ends: dict[int, float] = {}
    accuracy = None
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment
        )
        memory = Memory(process.pid)
        memory.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"round"'):
                ended = json.loads(line)
                ends.setdefault(ended["round"], time.perf_counter() - begin)
                accuracy = ended["accuracy"] or accuracy
        code = process.wait()
        memory.ended.set()
        if code or len(ends) < job.rounds:
            errors.seek(0)
            raise RuntimeError(f"{peer} ended with code {code} after {len(ends)} rounds:\n{errors.read()[-2000:]}")
    times = [ends[number] for number in sorted(ends)]
    rounds = [after - before for before, after in pairwise(times)]
    # In pfl's job the last round includes the evaluation.
    seconds = median(rounds[:-1] if job.evaluate_every > 1 else rounds)
    return {"seconds": seconds, "start": times[0] - seconds, "memory": memory.peak, "accuracy": accuracy}


def attainable(job: Job) -> Measured:
    """One round of prepared batches on all cores, without a simulator, with the evaluation if each round has one."""
    steps = job.cohort * job.images // job.batch_size // CORES
    passes = 10_000 // 500 // CORES if job.evaluate_every == 1 else 0
    return {"seconds": max(attainable_seconds(job.model, "float32", steps, passes))}


def measure(jobs: Sequence[str], peers: Sequence[str], turns: int, environments: Path, out: Path) -> None:
    """Measure all pairs, `turns` times, every second time in the opposite order."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "cifar10.pt"
        write_data(data)
        for turn in range(turns):
            for name in jobs:
                order = (REFERENCE, "fedbe", *peers)
                for peer in order if turn % 2 == 0 else reversed(order):
                    job = JOBS[name]
                    try:
                        found = attainable(job) if peer == REFERENCE else drive(peer, job, data, environments)
                    except (OSError, RuntimeError) as error:
                        print(f"{peer}, {name}: left out of turn {turn + 1}, {error}", file=sys.stderr, flush=True)
                        continue
                    line = {"job": name, "peer": peer, **found, "machine": describe_machine()}
                    print(line, flush=True)
                    with (out / "peers.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")


def installed(peers: Sequence[str], environments: Path) -> list[str]:
    """Install peers; returns those that did. The others are named."""
    found = []
    for peer in peers:
        try:
            install(environments, peer)
            found.append(peer)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{peer} did not install: {error}", file=sys.stderr, flush=True)
    return found


def grouped(rows: Sequence[Measured], job: str) -> dict[str, dict[str, list[float]]]:
    """The numbers of a job by peer and name, the fastest peer first."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["job"] == job:
            for key in ("seconds", "start", "memory", "accuracy"):
                found.setdefault(row["peer"], {}).setdefault(key, []).extend([row[key]] if key in row else [])
    return dict(sorted(found.items(), key=lambda pair: median(pair[1]["seconds"])))


def table(rows: Sequence[Measured], absent: Sequence[str] = ()) -> str:
    """Medians as Markdown. `absent` are peers that did not install."""
    lines = []
    for name, job in JOBS.items():
        # In pfl's job the peers evaluate in round 1 and fedbe does not, so it would seem to start faster than it does.
        columns = [column for column in REST if column[0] != "start" or job.evaluate_every == 1]
        titles = [column[1].format(rounds=job.rounds) for column in columns]
        found = grouped(rows, name)
        lines += [
            f"**{name}**: {job.cohort} of {job.clients} clients × {job.images} images, batch {job.batch_size}",
            "",
            f"| | seconds a round | of fedbe's | {' | '.join(titles)} | n |",
            "|---" * (len(titles) + 4) + "|",
        ]
        for peer, numbers in found.items():
            seconds = median(numbers["seconds"])
            ratio = f"{seconds / median(found['fedbe']['seconds']):.2f} ×" if "fedbe" in found else ""
            rest = [
                f"{median(numbers[key]) * unit:,.{digits}f}" if numbers[key] else "" for key, _, unit, digits in columns
            ]
            lines.append(f"| {' | '.join([peer, f'{seconds:.2f}', ratio, *rest, str(len(numbers['seconds']))])} |")
        lines.append("")
    machines = "; ".join(sorted({row["machine"] for row in rows}))
    missing = f" Did not install: {', '.join(absent)}." if absent else ""
    return "\n".join([*lines, f"Medians of n turns. {machines}.{missing}", ""])


REST = (  # key, title, factor, digits
    ("start", "start-up, s", 1, 1),
    ("memory", "memory, MB", 1, 0),
    ("accuracy", "accuracy in round {rounds}, %", 100, 1),
)


def picture(rows: Sequence[Measured], path: Path) -> None:
    """Seconds a round as bars, a panel for each job, with every measurement as a point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(JOBS)), JOBS, strict=True):
        found = {peer: numbers["seconds"] for peer, numbers in grouped(rows, name).items()}
        limit = found.pop(REFERENCE, None)
        slowest_first = list(found)[::-1]
        colours = ["#c44e52" if peer == "fedbe" else "#8da0b3" for peer in slowest_first]
        bars = axes.barh(slowest_first, [median(found[peer]) for peer in slowest_first], color=colours)
        axes.bar_label(bars, fmt="%.1f", padding=6)
        for peer, seconds in found.items():
            axes.plot(seconds, [peer] * len(seconds), "k.", markersize=4)
        if limit:
            axes.axvline(median(limit), color="black", linestyle=":", label="prepared batches, no simulator")
            axes.legend(loc="upper right", fontsize=8)
        axes.set_title({"paper": "The paper's round", "pfl": "pfl's published job"}[name], fontsize=10)
        axes.set_xlabel("seconds a round")
        axes.margins(x=0.12)
    figure.savefig(path, dpi=130)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, then write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--environments", type=Path, default=Path(os.environ.get("FEDBE_PEERS", ROOT / ".peers")))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "speed")
    args = parser.parse_args(given)
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [peer for peer in args.peers.split(",") if peer]
    peers = installed(wanted, args.environments)
    absent = [peer for peer in wanted if peer not in peers]
    measure(args.jobs.split(","), peers, args.turns, args.environments, args.out)
    rows = [json.loads(line) for line in (args.out / "peers.jsonl").read_text().splitlines()]
    (args.out / "peers.md").write_text(table(rows, absent))
    picture(rows, args.out / "peers.png")
    print(table(rows, absent))


if __name__ == "__main__":
    main()

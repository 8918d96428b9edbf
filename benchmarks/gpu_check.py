"""python -m benchmarks.gpu_check [DEVICE]: does an accelerator compute what the CPU computes, and how fast?

For people with a CUDA or Apple machine; without an accelerator it says so and ends. Parity is checked in float32
without TF32: training and server steps must agree with the CPU up to rounding, and with themselves to the last bit.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import fedbe
from fedbe.core.compute import cores, resolve_precision
from fedbe.core.devices import ask_for_same_bits, default_workers, describe_device, parse_devices, resolve_device
from fedbe.core.random import generator
from fedbe.data import Augment, make_loader
from fedbe.experiment import loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.executors import make_executor
from fedbe.experiment.recipe_files import load_recipe
from fedbe.models import build

TOLERANCE = 1e-3  # of the largest change of a weight, after a few steps
POINTS = 5.0  # of accuracy: two devices round differently, and training amplifies that
METHODS = ("fedavg", "scaffold", "fedbe", "fedbe-median")
RUNS = {"mlp": (), "convnet": ("model.name=convnet", "model.hidden=", "model.padding=1")}  # changes of the recipe
NETWORKS = ("mlp", "convnet", "resnet20", "mobilenetv2")


@dataclass(frozen=True)
class Finding:
    """One line of the result."""

    name: str
    good: bool
    detail: str


def main(arguments: list[str]) -> int:
    """Check a device, by default the one that "auto" chooses. Returns the exit code."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # also for worker processes
    device = resolve_device(arguments[0] if arguments else "auto")
    if device == "cpu" and not arguments:
        print(f"torch {torch.__version__} sees no accelerator here: there is nothing to check")
        return 0
    print(f"{describe_device(device)}, torch {torch.__version__}, {cores()} cores")
    torch.backends.cudnn.allow_tf32 = False
    ask_for_same_bits(parse_devices(device)[0])
    good = True
    for finding in (*parity(device), *whole_runs(device, default_workers(device, cores()))):
        print(f"{'ok ' if finding.good else 'BAD'}  {finding.name:<42}{finding.detail}")
        good = good and finding.good
    for line in speed(device):
        print(f"     {line}")
    print("all checks passed" if good else "some checks FAILED: please report this output")
    return 0 if good else 1


def parity(device: str) -> Iterator[Finding]:
    """Local training of every network, dropout and a server step, next to the CPU and next to themselves."""
    for name in NETWORKS:
        yield _same(f"local training of {name}", partial(_trained_network, name), device)
    first, again = (_trained(_dropout(), device) for _ in range(2))
    yield Finding("dropout follows the seed", torch.equal(first, again), "same bits twice")
    for method in METHODS:
        yield _same(f"server step of {method}", partial(_aggregated, method), device)


def _same(name: str, compute: Callable[[str], Tensor], device: str) -> Finding:
    here, there, again = compute("cpu"), compute(device), compute(device)
    error = float((there - here).abs().max() / here.abs().max())
    repeats = torch.equal(there, again)
    return Finding(name, error < TOLERANCE and repeats, f"error {error:.1e}, same bits twice: {repeats}")


def _network(name: str) -> nn.Module:
    return build(name, 10, (3, 32, 32), generator(0))


def _trained_network(name: str, device: str) -> Tensor:
    return _trained(_network(name), device)


def _dropout() -> nn.Module:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 10))
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator(1))
    return layers


def _trained(module: nn.Module, device: str) -> Tensor:
    """The change of all weights by a few steps on augmented images."""
    runner = fedbe.ModelRunner(module, fedbe.Plan(device=device))
    pixels = torch.randint(256, (64, 32, 32, 3), dtype=torch.uint8, generator=generator(2))
    images = make_loader(pixels, augment=Augment(4)).placed(lambda tensor: tensor.to(runner.device))
    settings = fedbe.LocalSettings(epochs=1, batch_size=16, lr=0.001)
    start = runner.read()
    return fedbe.train(runner, start, images, torch.arange(64) % 10, settings, generator(3)).state.params - start.params


def _aggregated(method: str, device: str) -> Tensor:
    """The global model after a round of three clients."""
    model = build("convnet", 10, (3, 32, 32), generator(4))
    states = [build("convnet", 10, (3, 32, 32), generator(5 + i)).state_dict() for i in range(3)]
    near = [{k: torch.lerp(v, s[k], 0.1) for k, v in model.state_dict().items()} for s in states]
    size = sum(p.numel() for p in model.parameters())
    extras = {"control": torch.linspace(-1, 1, size)}
    inputs = torch.randn(64, 3, 32, 32, generator=generator(8))
    known = fedbe.get_method(method).settings()
    quick = {k: v for k, v in {"distill_epochs": 1, "num_samples": 2, "gate": "off"}.items() if k in known}
    server = fedbe.server(method, model, unlabeled=inputs, plan=fedbe.Plan(device=device), **quick)
    result = server.aggregate(model.state_dict(), [fedbe.ClientUpdate(s, 10, i, extras) for i, s in enumerate(near)])
    return torch.cat([tensor.flatten() for tensor in result.values()])


def whole_runs(device: str, workers: int) -> Iterator[Finding]:
    """Small runs on the CPU, on the device in this process, and on the device with worker processes."""
    for name, changes in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            accuracy = partial(_accuracy, Path(folder), changes)
            here = accuracy("cpu", 0)[0]
            there, model = accuracy(device, 0)
            good = 100 * abs(there - here) <= POINTS
            yield Finding(f"a run with {name}", good, f"{100 * here:.1f} % on the CPU, {100 * there:.1f} % there")
            if workers:
                equal = accuracy(device, workers)[1] == model
                yield Finding(f"the same run with {workers} worker processes", equal, f"same bits: {equal}")


def _accuracy(folder: Path, changes: tuple[str, ...], device: str, workers: int) -> tuple[float, bytes]:
    small = ("training.rounds=3", "training.epochs=2", "split.clients=4", "settings.distill_epochs=3")
    run = folder / f"{device.replace(':', '')}-{workers}"
    run_folder.create(run, load_recipe("digits", (*small, *changes)), "fedbe", 0, "float32", device)
    with make_executor(workers) as executor:
        loop.execute(run, executor, Callback())
    return run_folder.read_rounds(run)[-1]["test"]["accuracy"], (run / run_folder.MODEL_FILE).read_bytes()


def speed(device: str) -> Iterator[str]:
    """Training speed of one process with the paper's batch of 40, with and without bfloat16."""
    for name in ("convnet", "resnet20"):
        for precision in dict.fromkeys(("float32", resolve_precision("auto", device))):
            rate = images_per_second(_network(name), fedbe.Plan(precision, device=device))
            yield f"{name}, {precision}: {rate:,.0f} training images a second, one process"


def images_per_second(module: nn.Module, plan: fedbe.Plan, epochs: int = 4) -> float:
    """Training images of local training per second, after a warm-up."""
    runner = fedbe.ModelRunner(module, plan)
    pixels = torch.randint(256, (2000, 32, 32, 3), dtype=torch.uint8, generator=generator(2))
    images = make_loader(pixels, augment=Augment(4)).placed(lambda tensor: tensor.to(runner.device))
    labels, start = torch.arange(2000) % 10, runner.read()

    def train(epochs: int) -> None:  # reading the loss waits for the device
        fedbe.train(runner, start, images, labels, fedbe.LocalSettings(epochs=epochs, lr=0.001), generator(0))

    train(1)
    begin = time.perf_counter()
    train(epochs)
    return 2000 * epochs / (time.perf_counter() - begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""FedBE's server step in the simulator next to a straightforward one in plain PyTorch, in turn.

    python -m benchmarks server                           # 20 epochs, as in the paper: ten minutes a turn
    python -m benchmarks.bench_server --epochs 4 --turns 2

Ten clients, ten samples and the average vote on 10,000 images through the ConvNet; then the student learns. Both
sides augment the images. The plain side is `benchmarks.plain_server`. A distillation takes as long as its epochs.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import plain_server
from benchmarks.bench_round import CORES, synthetic
from benchmarks.machine import describe_machine
from benchmarks.plain_loop import Images
from fedbe import Gaussian
from fedbe.algorithms.client.training import Trained
from fedbe.core.state import ModelState
from fedbe.core.updates import Update
from fedbe.experiment.cohort_training import TrainedCohort
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.round import run_server_step
from fedbe.experiment.run_state import RunState
from fedbe.experiment.simulation import Simulation, make_simulation

CLIENTS, SAMPLES = 10, 10
PARTS = ("fit and samples", "vote", "distillation", "whole step")


def made_up_clients(start: ModelState) -> dict[int, Trained]:
    """Clients near the global model."""
    draw = torch.Generator().manual_seed(0)
    noise = 0.01 * torch.randn(CLIENTS, len(start.params), generator=draw)
    states = [ModelState(start.params + one, start.buffers, start.counters) for one in noise]
    return {number: Trained(state, {}, {}, 1.0, 1) for number, state in enumerate(states)}


def ours(sim: Simulation, clients: dict[int, Trained]) -> list[float]:
    """The seconds of each part with the simulator. Samples are drawn while others vote, so they are timed once more."""
    state = RunState(0, sim.runner.read())
    result = run_server_step(sim, state, TrainedCohort(clients, [], 0.0), lambda *_: None, None)
    seconds = result.info.seconds
    posterior = Gaussian.fit([Update(number, trained.state, 1.0, {}) for number, trained in clients.items()])
    begin = time.perf_counter()
    for _ in posterior.sample_states(SAMPLES, torch.Generator().manual_seed(0)):
        pass
    return [seconds["fit"] + time.perf_counter() - begin, seconds["ensemble"], seconds["distill"]]


def main(given: Sequence[str] = ()) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args(given)
    settings = [f"settings.distill_epochs={args.epochs}", f"settings.num_samples={SAMPLES}", "settings.members=SAC"]
    recipe = load_recipe("cifar10-step", ["variant=paper", "evaluation.ensemble=", *settings])
    federation = prepare(recipe, 0, synthetic())
    assert federation.server is not None
    images = Images(synthetic().train.tensor[: len(federation.server)].permute(0, 3, 1, 2), torch.empty(0))
    model = federation.build_model()
    found: list[list[list[float]]] = []
    with ProcessPool(CORES) as pool:
        sim = make_simulation(recipe, "fedbe", 0, "float32", federation, pool)
        clients = made_up_clients(sim.runner.read())
        named = [sim.runner.layout.unpack(trained.state) for trained in clients.values()]
        for _ in range(args.turns):
            torch.set_num_threads(CORES)
            plain = plain_server.seconds_of(model, named, SAMPLES, images, args.epochs)
            found.append([[*part, sum(part)] for part in (ours(sim, clients), plain)])
            Console().print(found[-1])
    table = Table(
        "", "fedbe, s", "plain PyTorch, s", "ratio", title=f"{args.turns} turns, {args.epochs} epochs, medians"
    )
    for number, part in enumerate(PARTS):
        pairs = [(turn[0][number], turn[1][number]) for turn in found]
        ratio = median(b / a for a, b in pairs)
        table.add_row(
            part, f"{median(a for a, _ in pairs):.3f}", f"{median(b for _, b in pairs):.3f}", f"{ratio:.2f} ×"
        )
    Console().print(table)
    share = median(fit_and_samples / whole for (fit_and_samples, *_, whole), _ in found)
    Console().print(f"fit and samples are {100 * share:.2f} % of fedbe's step (goal: below 2 %)")
    Console().print(describe_machine())


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])

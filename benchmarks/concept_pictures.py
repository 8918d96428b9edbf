"""The pictures of README, docs/concepts.md and docs/howto.md: from records, tables in docs/default.md and small runs.

python -m benchmarks.concept_pictures [averaging posterior vote distillation gate calibration tuning default]

They are written to docs/pictures/, seed 0, in about a minute on one core.
"""

import re
import sys
import tempfile
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap, PowerNorm
from torch import Tensor

from fedbe.algorithms.client import LocalSettings, train
from fedbe.algorithms.distillation import DistillSettings, distill, sharpen
from fedbe.algorithms.server.context import Draft, Round
from fedbe.algorithms.vote import mean_vote, predict, softened_vote
from fedbe.core.inputs import TensorInputs
from fedbe.core.metrics import compute_metrics
from fedbe.core.model_runner import ModelRunner
from fedbe.core.moments import weighted_mean
from fedbe.core.random import generator
from fedbe.core.state import ModelState
from fedbe.data import load_task, split
from fedbe.experiment import loop, run_folder
from fedbe.experiment.callbacks import Callback
from fedbe.experiment.cohort_training import CohortTraining
from fedbe.experiment.executors.serial import Serial
from fedbe.experiment.federation import Federation, prepare
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.round import run_server_step
from fedbe.experiment.run_state import RunState
from fedbe.experiment.simulation import make_simulation
from fedbe.models import build
from fedbe.posterior import Gaussian
from fedbe.report.colours import light

DOCS = Path(__file__).parents[1] / "docs"
CLASS_COLOURS = ("#c04a00", "#0d8074", "#7557c9")
GREY, BLUE, ORANGE = light("fedavg"), light("fedbe"), light("v-distillation")
EPOCHS = (1, 2, 5, 10, 20, 50, 100)


class Lab:
    """Round 1 of FedAvg on digits, ten clients with two classes each: what FedBE's server sees."""

    def __init__(self) -> None:
        recipe = load_recipe("digits")
        self.federation: Federation = prepare(recipe, 0)
        seen: list[tuple[Draft, Round]] = []
        with Serial() as executor:
            sim = make_simulation(recipe, "fedavg", 0, "float32", self.federation, executor)
            state = RunState(0, sim.runner.read())
            cohort = CohortTraining(sim, state, None, lambda *_: None, lambda: False).run()
            run_server_step(sim, state, cohort, lambda *_: None, lambda d, r: seen.append((d, r)))
        self.runner: ModelRunner = sim.runner
        self.updates = seen[0][1].updates
        self.average = weighted_mean([(u.state, u.num_examples) for u in self.updates])
        self.posterior = Gaussian.fit(self.updates, model=self.runner.module)
        self.samples = list(self.posterior.sample_states(10, generator(0, 1, "posterior")))
        self.clients = [u.state for u in self.updates]

    def predictions(self, states: list[ModelState]) -> list[Tensor]:
        """The probabilities of each model on the test images."""
        return [predict(self.runner, state, self.federation.test) for state in states]

    def accuracy(self, probabilities: Tensor) -> float:
        """In percent, on the test images."""
        return 100 * compute_metrics(probabilities, self.federation.test_labels).accuracy


@cache
def lab() -> Lab:
    """One for all pictures."""
    return Lab()


def save(figure: Any, name: str) -> None:
    """Write docs/pictures/NAME.png, always with the same bytes."""
    folder = DOCS / "pictures"
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=90, metadata={"Software": None})
    plt.close(figure)


def averaging() -> None:
    """The Swiss roll: what three clients, their average and their vote say about each point of the plane."""
    task = load_task("swissroll", seed=0)
    inputs, labels = task.train.inputs, task.train.labels
    assert isinstance(inputs, Tensor)
    assert isinstance(task.test.inputs, Tensor)
    parts = split("step", labels, clients=3, server=300, seed=0, major_classes=1, major_share=0.8)
    runner = ModelRunner(build("mlp", 3, (2,), generator(0, role="model"), hidden=(100,)))
    average = runner.read()
    for number in range(1, 11):
        states: list[ModelState] = []
        for client, own in enumerate(parts.clients):
            local = LocalSettings(epochs=2, batch_size=100, lr=0.1)
            draw = generator(0, number, "train", client)
            states.append(train(runner, average, TensorInputs(inputs[own]), labels[own], local, draw).state)
        average = weighted_mean([(state, 1.0) for state in states])
    low, high = inputs.min(0).values - 1, inputs.max(0).values + 1
    x, y = (torch.linspace(float(low[i]), float(high[i]), 160) for i in (0, 1))
    plane = torch.cartesian_prod(x, y)

    def asked(points: Tensor) -> list[Tensor]:
        answers = [predict(runner, state, TensorInputs(points)) for state in (*states, average)]
        return [*answers, mean_vote(answers[:3])]

    figure, panels = plt.subplots(1, 5, figsize=(11, 2.7), layout="constrained")
    titles = ("client 1", "client 2", "client 3", "their average", "their vote")
    for panel, title, seen, judged in zip(panels, titles, asked(plane), asked(task.test.inputs), strict=True):
        regions = seen.argmax(1).reshape(160, 160).T.numpy()
        panel.pcolormesh(x, y, regions, cmap=ListedColormap(CLASS_COLOURS), alpha=0.3, vmin=0, vmax=2, rasterized=True)
        panel.scatter(*task.test.inputs.T, s=3, c=[CLASS_COLOURS[c] for c in task.test.labels.tolist()], linewidths=0)
        panel.set_title(f"{title}: {100 * compute_metrics(judged, task.test.labels).accuracy:.0f} %", fontsize=10)
        panel.set_xticks([])
        panel.set_yticks([])
    save(figure, "averaging")


def posterior() -> None:
    """Three weights of the digits' network: the clients' values, the Gaussian that is fitted to them, ten samples."""
    params = torch.stack([state.params for state in lab().clients]).double()
    mean, std = params.mean(0), params.std(0, unbiased=False)
    chosen = std.argsort(descending=True)[[0, len(std) // 1000, len(std) // 50]].tolist()
    figure, panels = plt.subplots(1, 3, figsize=(11, 2.6), layout="constrained", sharex=True)
    for panel, i in zip(panels, chosen, strict=True):
        centre, width = float(mean[i]), float(std[i])
        at = np.linspace(-0.8, 0.8, 800)
        density = np.exp(-(((at - centre) / width) ** 2) / 2)
        panel.fill_between(at, density, color=BLUE, alpha=0.15, linewidth=0)
        panel.plot(params[:, i], np.full(len(params), 0.08), "o", color=GREY, label="clients")
        panel.plot([float(s.params[i]) for s in lab().samples], np.full(10, 0.24), "x", color=BLUE, label="ten samples")
        panel.axvline(centre, color=GREY, linestyle="--", linewidth=1, label="average")
        panel.set_title(f"weight {i:,}: {centre:.2f} ± {width:.2f}", fontsize=10)
        panel.set_yticks([])
        panel.set_xlim(-0.8, 0.8)
    panels[0].legend(fontsize=8, loc="upper left", frameon=False)
    save(figure, "posterior")


def vote() -> None:
    """How right each member is alone, how right the votes are, and the vote on one image."""
    groups = {"clients": lab().clients, "samples": lab().samples, "average": [lab().average]}
    answers = {name: lab().predictions(states) for name, states in groups.items()}
    votes = {
        "samples": mean_vote(answers["samples"]),
        "clients": mean_vote(answers["clients"]),
        "all (SAC)": mean_vote([p for group in answers.values() for p in group]),
        "auto: A and C, softened": softened_vote([*answers["average"], *answers["clients"]]),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained", width_ratios=(1.15, 1))
    rows = list(groups) + [f"vote: {name}" for name in votes]
    for row, name in enumerate(groups):
        single = [lab().accuracy(p) for p in answers[name]]
        left.plot(single, [row] * len(single), "o", color=GREY, alpha=0.6)
    for row, probabilities in enumerate(votes.values(), len(groups)):
        left.barh(row, lab().accuracy(probabilities), color=BLUE, alpha=0.8, height=0.6)
        left.text(
            lab().accuracy(probabilities) + 1, row, f"{lab().accuracy(probabilities):.0f}", va="center", fontsize=9
        )
    left.set_yticks(range(len(rows)), rows, fontsize=9)
    left.invert_yaxis()
    left.set_xlim(0, 100)
    left.set_xlabel("test accuracy, %")
    _one_image(right, [*answers["clients"], *answers["average"]], votes["auto: A and C, softened"])
    save(figure, "vote")


def _one_image(axes: Any, members: list[Tensor], voted: Tensor) -> None:
    """The first test image on which the average is wrong and the vote is right: probabilities of each member."""
    labels = lab().federation.test_labels
    wrong = (members[-1].argmax(1) != labels) & (voted.argmax(1) == labels)
    chosen = int(wrong.nonzero()[0])
    table = torch.stack([*(member[chosen] for member in members), voted[chosen]])
    axes.imshow(table, cmap="Blues", norm=PowerNorm(0.5, 0, 1), aspect="auto")
    names = [*(f"client {i}" for i in range(1, len(members))), "average", "vote"]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xticks(range(10))
    axes.axhline(len(names) - 2.5, color="white", linewidth=3)
    axes.set_xlabel("class")
    axes.set_title(f"probabilities on one image of a {int(labels[chosen])}", fontsize=10)


def distillation() -> None:
    """The student after more and more epochs, by SGD and by SWA, next to its teacher."""
    server = lab().federation.server
    assert server is not None
    members = [predict(lab().runner, state, server) for state in (lab().average, *lab().clients)]
    targets = sharpen(softened_vote(members), 3.0)
    figure, axes = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
    settings = DistillSettings(distill_lr=0.1, distill_lr_min=0.04, augment=False)
    for optimizer, colour in (("swa", BLUE), ("sgd", ORANGE)):
        line = []
        for epochs in EPOCHS:
            chosen = replace(settings, optimizer=optimizer, distill_epochs=epochs)
            student = distill(lab().runner, lab().average, server, targets, chosen, generator(0, 1, "distill"))
            line.append(lab().accuracy(lab().predictions([student])[0]))
        axes.plot(EPOCHS, line, "o-", color=colour, label=f"student, {optimizer.upper()}")
    teacher = softened_vote(lab().predictions([lab().average, *lab().clients]))
    for value, name, style, label_at in (
        (lab().accuracy(teacher), "its teacher, the vote", "-", 0.7),
        (lab().accuracy(lab().predictions([lab().average])[0]), "its start, the average: after 0 epochs", "--", -2.4),
    ):
        axes.axhline(value, color=GREY, linestyle=style, linewidth=1)
        axes.text(1, value + label_at, name, fontsize=9, color=GREY)
    axes.set_ylim(45, 97)
    axes.set_xscale("log")
    axes.set_xticks(EPOCHS, [str(e) for e in EPOCHS])
    axes.minorticks_off()
    axes.set_xlabel("epochs over 300 unlabeled images")
    axes.set_ylabel("test accuracy, %")
    axes.legend(fontsize=9, frameon=False, loc="center right")
    save(figure, "distillation")


@cache
def gated_run() -> list[dict[str, Any]]:
    """Twelve rounds of the default on digits; one line for each round."""
    recipe = load_recipe("digits", ["training.rounds=12", "training.epochs=10"])
    with tempfile.TemporaryDirectory() as place, Serial() as executor:
        folder = run_folder.create(Path(place) / "run", recipe, "fedbe", seed=0, precision="float32")
        loop.execute(folder, executor, Callback())
        return list(run_folder.read_rounds(folder))


def _accuracies(lines: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    return [line["round"] for line in lines], [100 * line["test"]["accuracy"] for line in lines]


def gate() -> None:
    """Agreement of average and student with the vote, and who stays, by round."""
    lines = [line for line in gated_run() if line["server"].get("gate")]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3), layout="constrained")
    rounds = [line["round"] for line in lines]
    decisions = [line["server"]["gate"] for line in lines]
    for key, colour in (("average", GREY), ("student", BLUE)):
        left.plot(rounds, [100 * d[key] for d in decisions], "o-", color=colour, label=key)
    left.set_ylabel("agreement with the vote, %")
    left.legend(fontsize=9, frameon=False)
    everything = gated_run()
    numbers = [line["round"] for line in everything]
    right.plot(*_accuracies(everything), "-", color=BLUE, linewidth=1)
    for kept, marker, label in ((True, "o", "the student stays"), (False, "s", "the average stays")):
        at = [line for line in lines if bool(line["server"]["gate"]["accepted"]) is kept]
        right.plot(*_accuracies(at), marker, color=BLUE if kept else GREY, label=label)
    resting = [line for line in everything if line not in lines]
    right.plot(*_accuracies(resting), "|", color=GREY, markersize=12, label="the server rests")
    right.set_ylabel("test accuracy, %")
    right.legend(fontsize=9, frameon=False)
    for axes in (left, right):
        axes.set_xticks(numbers)
        axes.set_xlabel("round")
    save(figure, "gate")


def calibration() -> None:
    """Reliability of a client, of the average and of the vote: how often they are right when they say p."""
    members = lab().predictions([lab().average, *lab().clients])
    shown = {"client 1": members[1], "average": members[0], "vote": softened_vote(members)}
    shown["vote, sharpened by 3"] = sharpen(shown["vote"], 3.0)
    figure, panels = plt.subplots(1, 4, figsize=(11, 2.9), layout="constrained", sharey=True)
    labels, edges = lab().federation.test_labels, torch.linspace(0, 1, 11)
    for panel, (name, probabilities) in zip(panels, shown.items(), strict=True):
        sure, guess = probabilities.max(1)
        right = (guess == labels).double()
        panel.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
        for low, high in pairwise(edges.tolist()):
            inside = (sure > low) & (sure <= high)
            if count := int(inside.sum()):
                shade = 0.25 + 0.75 * count / len(labels)
                panel.bar((low + high) / 2, float(right[inside].mean()), 0.09, color=BLUE, alpha=shade)
        measured = compute_metrics(probabilities, labels)
        panel.set_title(
            f"{name}\nsays {100 * measured.confidence:.0f} %, is right in {100 * measured.accuracy:.0f} %", fontsize=9
        )
        panel.set_xlabel("says")
    panels[0].set_ylabel("is right")
    save(figure, "calibration")


def tables(page: Path) -> list[list[list[str]]]:
    """The tables of a Markdown page: rows of cells."""
    blocks = re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.M)
    rows = [[[c.strip(" *") for c in line.strip("|").split("|")] for line in block.splitlines()] for block in blocks]
    return [[row for row in table if not set("".join(row)) <= set("-: ")] for table in rows]


def tuning() -> None:
    """Two tables of docs/default.md as curves: temperature and members, and accuracy by round."""
    by_head = {table[0][0]: table for table in tables(DOCS / "default.md")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    head, *rows = by_head["members"]
    temperatures = [1.0, *(float(re.findall(r"[\d.]+$", cell)[0]) for cell in head[2:])]
    for (name, *cells), colour in zip(rows, ("#000000", BLUE, "#0d8074", ORANGE), strict=True):
        points = [(t, float(cell)) for t, cell in zip(temperatures, cells, strict=True) if cell]
        left.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
    left.set_xlabel("temperature of the members' votes (1: plain mean)")
    left.set_ylabel("accuracy of the vote, %")
    head, *rows = by_head["round"]
    colours = (GREY, ORANGE, BLUE, "#6fb1ff")
    for (name, *cells), colour in zip(rows, colours, strict=True):
        points = [(int(n), float(cell)) for n, cell in zip(head[1:], cells, strict=True) if cell]
        right.plot(*zip(*points, strict=True), ".-", color=colour, label=re.sub(r" \(stopped.*", "", name))
    right.set_xlabel("round")
    right.set_ylabel("validation accuracy, %")
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False, loc="lower right")
    save(figure, "tuning")


RUNS = {
    "fedavg": ("FedAvg", GREY),
    "fedbe": ("FedBE, the paper's settings", ORANGE),
    "fedbe-tuned": ("FedBE, tuned", "#6fb1ff"),
    "fedbe-auto": ("FedBE, the default", BLUE),
}


def default() -> None:
    """The default on CIFAR-10, in each run of results/ that is finished, next to others of the same split and seed."""
    records = DOCS.parent / "results" / "reproduce-table1-paper"
    finished = [p for p in sorted(records.glob("*--fedbe-auto--convnet/seed*")) if run_folder.read_info(p).finished]
    figure, panels = plt.subplots(1, len(finished), figsize=(5 * len(finished), 3.4), layout="constrained", sharey=True)
    for panel, path in zip(np.atleast_1d(panels), finished, strict=True):
        kind, seed = path.parent.name.partition("--")[0], path.name.removeprefix("seed")
        for name, (label, colour) in RUNS.items():
            folder = records / f"{kind}--{name}--convnet" / path.name
            if run_folder.exists(folder):
                rounds = run_folder.read_rounds(folder)
                accuracy = [100 * record["test"]["accuracy"] for record in rounds]
                panel.plot([r["round"] for r in rounds], accuracy, color=colour, label=f"{label}: {accuracy[-1]:.1f}")
        panel.set_title(f"{kind.capitalize()}, seed {seed}", fontsize=10)
        panel.set_xlabel("round")
        panel.legend(fontsize=8, frameon=False, loc="lower right")
    np.atleast_1d(panels)[0].set_ylabel("test accuracy, %")
    save(figure, "default")


PICTURES = {f.__name__: f for f in (averaging, posterior, vote, distillation, gate, calibration, tuning, default)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or PICTURES:
        PICTURES[chosen]()
        print(f"docs/pictures/{chosen}.png", flush=True)

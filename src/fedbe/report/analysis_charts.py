"""Charts of what `fedbe.analysis` measures: sampled models between clients, calibration, features."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedbe.analysis.calibration import BINS
from fedbe.analysis.features import FOREIGN, NOISE
from fedbe.analysis.rerun import rerun_last_round
from fedbe.analysis.runs import Run, RunGroup
from fedbe.analysis.simplex import SimplexSamples, sample
from fedbe.errors import FedBEError
from fedbe.report.chart import Chart, Dot, Panel, Table

CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.5, math.sqrt(3) / 2))
Measured = Sequence[tuple[Run, Mapping[str, Any]]]  # runs, each with the JSON that an analysis measured


def has_simplex(group: RunGroup) -> bool:
    """Whether the page shows the triangle: three clients on the Swiss roll."""
    return group.recipe.data.source == "swissroll" and group.recipe.split.clients == 3


def simplex_of_group(group: RunGroup) -> Chart | str:
    """The triangle of the group's first finished run, or a sentence that says why there is none."""
    run = next((r for r in group.runs if r.finished), None)
    if run is None:
        return "The triangle of sampled models is not shown: no run is finished."
    try:
        return simplex_chart(run, sample(rerun_last_round(run)))
    except FedBEError as error:
        return f"The triangle of sampled models is not shown: {error}."


def simplex_chart(run: Run, samples: SimplexSamples) -> Chart:
    """Figure 1b of the paper: each sampled model at its γ, coloured by its test accuracy."""
    accuracies = [*samples.judged.accuracies, *(a for _, a in samples.clients), samples.average]
    low, high = min(accuracies), max(accuracies)

    def dot(gamma: Iterable[float], accuracy: float, role: str, label: str) -> Dot:
        x, y = (float(sum(g * c[axis] for g, c in zip(gamma, CORNERS, strict=True))) for axis in (0, 1))
        share = (accuracy - low) / (high - low) if high > low else 1.0
        return Dot(x, y, f"{label}: {accuracy:.1f} %", colour=share, role=role)

    models = list(zip(samples.gammas, samples.judged.accuracies, strict=True))
    best = max(models, key=lambda model: model[1])
    dots = [dot(g, a, "", _gamma(g)) for g, a in models]
    dots += [dot([float(i == j) for j in range(3)], a, "corner", name) for i, (name, a) in enumerate(samples.clients)]
    dots += [dot((1 / 3,) * 3, samples.average, "centre", "FedAvg"), dot(*best, "best", "best")]
    above = sum(a > samples.average for a in samples.judged.accuracies)
    rows = (d.label.removesuffix(" %").rpartition(": ") for d in reversed(dots))
    return Chart(
        "triangle",
        "triangle",
        f"{above} of {len(models)} sampled models beat FedAvg's {samples.average:.1f} %",
        f"Models between the three clients of the last round (n = 1 run: {run.title}, seed {run.info.seed}, round "
        f"{len(run.records)}), sampled from a Dirichlet with α = {samples.alpha}. The position is the mixture γ: the "
        "corners are the clients' models, the centre is FedAvg's average. The star is the best sample, colour is test "
        f"accuracy (paper, Figure 1b). The vote of ten samples reaches {samples.judged.vote:.1f} % on average.",
        (Panel(dots=tuple(dots), scale=(low, high)),),
        Table(("Model", "Test accuracy, %"), tuple((name, accuracy) for name, _, accuracy in rows)),
        unit="%",
    )


def _gamma(gamma: Iterable[float]) -> str:
    return f"γ = ({', '.join(f'{g:.2f}' for g in gamma)})"


def calibration_chart(measured: Measured, names: Mapping[str, str]) -> Chart:
    """Figure 1c of the paper: right and wrong predictions by confidence, of clients and of samples.

    Args:
        measured: Runs, each with the result of `analysis.calibration.measure`.
        names: The data sets' names for people, by source.
    """
    panels, rows, findings = [], [], []
    for run, groups in measured:
        source = _source(run, names)
        findings.append(
            f"{source}: clients {100 * groups['clients']['confidence when wrong']:.0f} %, "
            f"samples {100 * groups['samples']['confidence when wrong']:.0f} %"
        )
        for group in ("clients", "samples"):
            right, wrong = groups[group]["bins"]
            title = f"{source}: {groups[group]['models']} {group}, accuracy {100 * groups[group]['accuracy']:.0f} %"
            panels.append(Panel(title, rows=("right", "wrong"), counts=(tuple(right), tuple(wrong))))
            for i, (a, b) in enumerate(zip(right, wrong, strict=True)):
                rows.append((source, group, f"{i / BINS:.2f}", f"{(i + 1) / BINS:.2f}", f"{a:.1f}", f"{b:.1f}"))
    runs = "; ".join(
        f"{_source(run, names)}: {run.title}, seed {run.info.seed}, round {len(run.records)}" for run, _ in measured
    )
    return Chart(
        "confidence",
        "histogram",
        f"Mean confidence of wrong predictions: {'; '.join(findings)}",
        "Test examples by the confidence (largest probability) of the prediction, right and wrong ones stacked: "
        "mean over the clients' models of the last round, and over as many models sampled from the posterior fitted to "
        f"them (paper, Figure 1c and appendix). One run for each row: {runs}.",
        tuple(panels),
        Table(("Data", "Models", "Confidence from", "to", "Right", "Wrong"), tuple(rows)),
        "confidence",
        "test examples",
    )


def features_chart(measured: Measured, names: Mapping[str, str]) -> Chart:
    """The appendix's t-SNE pictures: the inputs of the last layer, coloured by class.

    Args:
        measured: Runs, each with the result of `analysis.features.measure`.
        names: The data sets' names for people, by source.
    """
    panels, rows, findings = [], [], []
    for run, parts in measured:
        findings.append(f"{run.title} {100 * parts['own']['purity']:.0f} %")
        classes = tuple(dict.fromkeys(sorted(parts["own"]["classes"])))
        foreign = FOREIGN.get(run.recipe.data.source, "")
        images = {"own": _source(run, names), "foreign": "noise" if foreign == NOISE else names.get(foreign, foreign)}
        for part, values in ((part, parts[part]) for part in images if not isinstance(parts[part], str)):
            points = [(x, y, name) for (x, y), name in zip(values["points"], values["classes"], strict=True)]
            title = f"{run.title} on {images[part]}: purity {100 * values['purity']:.0f} %"
            panels.append(Panel(title, rows=classes, dots=tuple(Dot(x, y, name) for x, y, name in points)))
            rows += [(run.title, images[part], f"{x:.3f}", f"{y:.3f}", name) for x, y, name in points]
    runs = ", ".join(f"{r.title} after {len(r.records)} rounds, seed {r.info.seed}" for r, _ in measured)
    return Chart(
        "features",
        "clouds",
        f"Nearest neighbours in feature space with the same class: {', '.join(findings)}",
        "t-SNE of the inputs of the last layer: test images, coloured by their label, and images of another data set, "
        f"coloured by the network's prediction (paper, appendix). One run for each method: {runs}.",
        tuple(panels),
        Table(("Method", "Images", "x", "y", "Class"), tuple(rows)),
    )


def _source(run: Run, names: Mapping[str, str]) -> str:
    return names.get(run.recipe.data.source, run.recipe.data.source)

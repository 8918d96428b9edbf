"""How well a trained network keeps classes apart: the inputs of its last layer, measured, and drawn by t-SNE.

As in the paper's appendix: test images of three classes that mean different things, coloured by their label; and
images of another set, coloured by what the network takes them for.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbe.analysis.runs import Trial
from fedbe.data.auxiliary import fit
from fedbe.errors import DataError
from fedbe.experiment.executors.process_pool import ProcessPool
from fedbe.experiment.saved_model import Loaded, open_run
from fedbe.report.chart import Chart, Dot, Panel, Table
from fedbe.report.clients import load_task
from fedbe.reproduce.study import NAMES

CLASSES = (1, 3, 6)  # of CIFAR-10: automobile, cat, frog
NOISE = "fedbe.reproduce.smoke:images"
FOREIGN = {"cifar10": "cifar100", "digits": NOISE}
MOST = 3000  # images; as many as CIFAR-10's test set has of three classes
NEIGHBOURS = 10


def measure(trial: Trial, _: ProcessPool) -> dict[str, Any]:
    """For test and for foreign images: how pure neighbourhoods are, the silhouette, and the points of the picture."""
    loaded, source = open_run(trial.folder), trial.recipe.data.source
    test = load_task(source).test
    kept = torch.isin(test.labels, torch.tensor(CLASSES))
    own, _predicted = penultimate(loaded, test.inputs[kept][:MOST])
    accuracy = trial.records[-1]["test"]["accuracy"]
    seed = trial.info.seed
    return {
        "own": {"accuracy": accuracy, **_separation(own, test.labels[kept][:MOST], loaded.classes, seed)},
        "foreign": _foreign(loaded, FOREIGN[source], seed) if source in FOREIGN else f"no images go with {source}",
    }


def _foreign(loaded: Loaded, source: str, seed: int) -> dict[str, Any] | str:
    try:
        images = load_task(source).test.inputs
    except DataError as error:
        return str(error)
    channels, height, width = loaded.spec.shape
    found, predicted = penultimate(loaded, fit(images, (channels, height, width)))
    kept = torch.isin(predicted, torch.tensor(CLASSES)).nonzero().flatten()[:MOST]
    if len(kept) <= NEIGHBOURS or len(set(predicted[kept].tolist())) < 2:
        return f"too few images of {source} are taken for one of the three classes"
    return _separation(found[kept], predicted[kept], loaded.classes, seed)


@torch.no_grad()
def penultimate(loaded: Loaded, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What the last linear layer is given for each input [N, features], and the class that it names [N]."""
    given: list[Tensor] = []
    head = [m for m in loaded.module.modules() if isinstance(m, nn.Linear)][-1]
    hook = head.register_forward_pre_hook(lambda _, values: given.append(values[0]))
    try:
        predicted = loaded.probabilities(inputs).argmax(1)
    finally:
        hook.remove()
    return torch.cat(given), predicted


def _separation(features: Tensor, classes: Tensor, names: Sequence[str], seed: int) -> dict[str, Any]:
    from sklearn.manifold import TSNE  # slow to import, and only this study needs it
    from sklearn.metrics import silhouette_score

    # PCA as a start and a fixed seed: the picture is the same each time.
    drawn = TSNE(init="pca", perplexity=min(30.0, (len(features) - 1) / 3), random_state=seed)
    points = drawn.fit_transform(features.numpy())
    return {
        "purity": purity(features, classes),
        "silhouette": float(silhouette_score(features.numpy(), classes.numpy())),
        "points": [[round(float(v), 3) for v in point] for point in points],
        "classes": [names[i] for i in classes.tolist()],
    }


def purity(features: Tensor, classes: Tensor, neighbours: int = NEIGHBOURS) -> float:
    """The share of an image's nearest images that are of its class, on average.

    >>> purity(torch.tensor([[0.0], [1.0], [10.0], [11.0], [11.5]]), torch.tensor([0, 0, 1, 1, 0]), neighbours=1)
    0.6
    """
    far = torch.cdist(features.double(), features.double()).fill_diagonal_(torch.inf)
    nearest = far.topk(neighbours, largest=False).indices
    return float((classes[nearest] == classes[:, None]).double().mean())


def chart(seen: Sequence[tuple[Trial, dict[str, Any]]]) -> Chart:
    panels, rows, findings = [], [], []
    for trial, found in seen:
        findings.append(f"{trial.title} {100 * found['own']['purity']:.0f} %")
        source = trial.recipe.data.source
        for part, images in (("own", source), ("foreign", FOREIGN.get(source, ""))):
            if isinstance(found[part], str):
                continue
            images = {**NAMES, NOISE: "noise"}.get(images, images)
            names = tuple(dict.fromkeys(sorted(found["own"]["classes"])))
            points = [(x, y, name) for (x, y), name in zip(found[part]["points"], found[part]["classes"], strict=True)]
            title = f"{trial.title} on {images}: {100 * found[part]['purity']:.0f} % pure"
            panels.append(Panel(title, rows=names, dots=tuple(Dot(x, y, name) for x, y, name in points)))
            rows += [(trial.title, images, f"{x:.3f}", f"{y:.3f}", name) for x, y, name in points]
    runs = ", ".join(f"{t.title} after {len(t.records)} rounds, seed {t.info.seed}" for t, _ in seen)
    return Chart(
        "features",
        "clouds",
        f"Neighbours in feature space share the class: {', '.join(findings)}",
        "Inputs of the last layer for test images, drawn by t-SNE: coloured by their label, and for images of the "
        f"other set by the network's prediction (paper, appendix). One run for each method: {runs}.",
        tuple(panels),
        Table(("Method", "Images", "x", "y", "Class"), tuple(rows)),
    )

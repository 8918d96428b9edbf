"""How well a trained network separates classes: the inputs of its last layer, measured, and placed by t-SNE.

As in the paper's appendix: test images of three classes by their label, and images of another data set by the class
that the network predicts for them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbe.analysis.data import load_task
from fedbe.analysis.runs import Run
from fedbe.data.auxiliary import match_shape
from fedbe.errors import DataError
from fedbe.experiment.executors.base import Executor
from fedbe.experiment.federation import is_image
from fedbe.experiment.saved_model import TrainedModel, load_trained_model

CLASSES = (1, 3, 6)  # of CIFAR-10: automobile, cat, frog
NOISE = "fedbe.data.embedded:noise"
FOREIGN = {"cifar10": "cifar100", "digits": NOISE}  # the other data set, by the one that the network was trained on
MAX_IMAGES = 3000  # as many as CIFAR-10's test set has of three classes
NEIGHBOURS = 10


def measure(run: Run, _: Executor) -> dict[str, Any]:
    """Separation of the classes in test images (`own`) and in images of another data set (`foreign`).

    Returns:
        For each part: `purity`, `silhouette`, and the `points` and `classes` of the picture; or a sentence that says
        why the part is missing.
    """
    loaded, source = load_trained_model(run.folder), run.recipe.data.source
    test = load_task(source).test
    chosen = torch.isin(test.labels, torch.tensor(CLASSES))
    features, _predicted = penultimate(loaded, test.tensor[chosen][:MAX_IMAGES])
    accuracy = run.records[-1]["test"]["accuracy"]
    seed = run.info.seed
    return {
        "own": {"accuracy": accuracy, **_separation(features, test.labels[chosen][:MAX_IMAGES], loaded.classes, seed)},
        "foreign": _foreign(loaded, FOREIGN[source], seed) if source in FOREIGN else f"no images go with {source}",
    }


def _foreign(loaded: TrainedModel, source: str, seed: int) -> dict[str, Any] | str:
    try:
        images = load_task(source).test.tensor
    except DataError as error:
        return str(error)
    if not is_image(loaded.spec.shape):
        return f"the model takes no images, but {source} has images"
    features, predicted = penultimate(loaded, match_shape(images, loaded.spec.shape))
    chosen = torch.isin(predicted, torch.tensor(CLASSES)).nonzero().flatten()[:MAX_IMAGES]
    if len(chosen) <= NEIGHBOURS or len(set(predicted[chosen].tolist())) < 2:
        return f"too few images of {source} are predicted as one of the three classes"
    return _separation(features[chosen], predicted[chosen], loaded.classes, seed)


@torch.no_grad()
def penultimate(loaded: TrainedModel, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of the last linear layer, [N, features], and the predicted classes, int64 [N]."""
    batches: list[Tensor] = []
    head = [m for m in loaded.module.modules() if isinstance(m, nn.Linear)][-1]
    hook = head.register_forward_pre_hook(lambda _, values: batches.append(values[0]))
    try:
        predicted = loaded.predict_proba(inputs).argmax(1)
    finally:
        hook.remove()
    return torch.cat(batches), predicted


def _separation(features: Tensor, classes: Tensor, names: Sequence[str], seed: int) -> dict[str, Any]:
    from sklearn.manifold import TSNE  # slow to import, and only this study needs it
    from sklearn.metrics import silhouette_score

    # PCA as a start and a fixed seed: the picture is the same each time.
    tsne = TSNE(init="pca", perplexity=min(30.0, (len(features) - 1) / 3), random_state=seed)
    points = tsne.fit_transform(features.numpy())
    return {
        "purity": purity(features, classes),
        "silhouette": float(silhouette_score(features.numpy(), classes.numpy())),
        "points": [[round(float(v), 3) for v in point] for point in points],
        "classes": [names[i] for i in classes.tolist()],
    }


def purity(features: Tensor, classes: Tensor, neighbours: int = NEIGHBOURS) -> float:
    """Mean share of an image's nearest images that have its class.

    Args:
        features: [N, features].
        classes: int64 [N].
        neighbours: How many of the nearest images count.

    Example:
        >>> purity(torch.tensor([[0.0], [1.0], [10.0], [11.0], [11.5]]), torch.tensor([0, 0, 1, 1, 0]), neighbours=1)
        0.6
    """
    distances = torch.cdist(features.double(), features.double()).fill_diagonal_(torch.inf)
    nearest = distances.topk(neighbours, largest=False).indices
    return float((classes[nearest] == classes[:, None]).double().mean())

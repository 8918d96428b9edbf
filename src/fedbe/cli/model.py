"""`fedbe evaluate` and `fedbe predict`: use the final model of a run."""

from pathlib import Path
from typing import Annotated

import typer

from fedbe.cli.console import out
from fedbe.cli.options import RunFolder, Trust
from fedbe.errors import DataError


def evaluate(
    run: RunFolder,
    data: Annotated[str | None, typer.Option(help="A data source; default: the run's.")] = None,
    trust: Trust = False,  # noqa: ARG001 (its callback acts)
) -> None:
    """Measure the final model of a run on test data."""
    from fedbe.data import load_task
    from fedbe.experiment import saved_model
    from fedbe.experiment.run_folder import read_recipe

    model = saved_model.load_trained_model(run)
    test = load_task(data or read_recipe(run).data.source).test
    if test.classes != model.classes:
        raise DataError(f"the model was trained on {len(model.classes)} classes; {test.name} has other classes")
    metrics = model.metrics(test.inputs, test.labels)
    out.print(f"{test.name}, {len(test)} test examples: accuracy {100 * metrics.accuracy:.2f} %")
    out.print(f"nll {metrics.nll:.4f}, ece {metrics.ece:.4f}, mean confidence {100 * metrics.confidence:.2f} %")


def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    trust: Trust = False,  # noqa: ARG001 (its callback acts)
) -> None:
    """Classify images with the final model of a run."""
    from fedbe.experiment import saved_model

    model = saved_model.load_trained_model(run)
    probabilities = model.predict_proba(saved_model.read_images(images, model.spec.shape))
    for path, row in zip(images, probabilities, strict=True):
        top = row.topk(min(3, len(row)))
        ranked = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        out.print(f"{path}: " + ", ".join(f"{model.classes[i]} {100 * p:.1f} %" for p, i in ranked))

"""`fedbe evaluate` and `fedbe predict`: use the final model of a run."""

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbe.cli.console import err, out, visible
from fedbe.cli.options import OneDevice, RunFolder, Trust, choose_device
from fedbe.errors import DataError, RunError

if TYPE_CHECKING:
    from fedbe.experiment.saved_model import TrainedModel


def evaluate(
    run: RunFolder,
    data: Annotated[
        str | None, typer.Option(help="A data source, of which the test part is used; default: the run's.")
    ] = None,
    device: OneDevice = "auto",
    trust: Trust = False,  # noqa: ARG001 (its callback acts)
) -> None:
    """Measure the final model of a run on test data."""
    from fedbe.data import Task
    from fedbe.data.sources import hold_out, load_data
    from fedbe.experiment import run_folder

    model = _load(run, device)
    found = load_data(data or run_folder.read_recipe(run).data.source)
    if data and not isinstance(found, Task):
        err.print(f"{found.name} has no test part: the fifth of it that is held out with seed 0 is measured")
    test = (found if isinstance(found, Task) else hold_out(found, 0)).test
    if test.classes != model.classes:
        raise DataError(f"the model was trained on {len(model.classes)} classes; {test.name} has other classes")
    metrics = model.metrics(test.inputs, test.labels)
    if not data and run_folder.exists(run) and (precision := run_folder.read_info(run).precision) != "float32":
        err.print(f"measured in float32; the run measured in {precision}, so its own numbers differ a little")
    out.print(f"{test.name}, {len(test)} test examples: accuracy {100 * metrics.accuracy:.2f} %")
    out.print(f"nll {metrics.nll:.4f}, ece {metrics.ece:.4f}, mean confidence {100 * metrics.confidence:.2f} %")


def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders with images at any depth.")],
    form: Annotated[str, typer.Option("--format", help="text, csv or json: one line for each image.")] = "text",
    device: OneDevice = "auto",
    trust: Trust = False,  # noqa: ARG001 (its callback acts)
) -> None:
    """Classify images with the final model of a run. What cannot be read is reported and skipped."""
    from fedbe.errors import check_option
    from fedbe.experiment import saved_model

    check_option("format", form, FORMATS)
    model = _load(run, device)
    saved_model.check_takes_images(model.spec.shape)
    files, failed = _image_files(images), 0
    for line in FORMATS[form]([], ()):  # the head of a CSV
        typer.echo(line)
    for path in files:
        try:
            if path.is_dir():
                raise DataError(f"{path} has no images")
            row = model.predict_proba(saved_model.read_image(path, model.spec.shape))[0].tolist()
        except DataError as error:
            failed += 1
            err.print(f"fedbe: {error}; skipped")
            continue
        ranked = sorted(zip(row, model.classes, strict=True), key=lambda pair: -pair[0])
        for line in FORMATS[form](ranked, (str(path),)):
            typer.echo(visible(line))
    if failed:
        err.print(f"fedbe: {failed} of {len(files)} paths could not be read")
        raise typer.Exit(1)


def _load(run: Path, device: str) -> "TrainedModel":
    from fedbe.experiment import comparison, saved_model

    if comparison.is_comparison(run):
        names = ", ".join(str(path) for path in comparison.cells(run))
        raise RunError(f"{run} is a comparison; name one of its runs: {names}")
    return saved_model.load_trained_model(run, choose_device(device))


Ranked = list[tuple[float, str]]  # probability and class, the most probable first


def _as_text(ranked: Ranked, paths: tuple[str, ...]) -> list[str]:
    return [f"{path}: " + ", ".join(f"{name} {100 * p:.1f} %" for p, name in ranked[:3]) for path in paths]


def _as_csv(ranked: Ranked, paths: tuple[str, ...]) -> list[str]:
    rows = [[path, ranked[0][1], f"{ranked[0][0]:.6f}"] for path in paths] or [["file", "class", "probability"]]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerows(rows)
    return [text.getvalue()]


def _as_json(ranked: Ranked, paths: tuple[str, ...]) -> list[str]:
    return [
        json.dumps({"file": path, "class": ranked[0][1], "probabilities": {name: p for p, name in ranked}})
        for path in paths
    ]


FORMATS = {"text": _as_text, "csv": _as_csv, "json": _as_json}


def _image_files(paths: list[Path]) -> list[Path]:
    """The files, and all images in the folders, sorted. A folder without images stays in the list."""
    from fedbe.data.readers.images import is_image_file

    files: list[Path] = []
    for path in paths:
        inside = sorted(filter(is_image_file, path.rglob("*"))) if path.is_dir() else []
        files += inside or [path]
    return files

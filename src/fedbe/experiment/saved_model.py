"""The final model of a run: written when the run ends, loaded for predictions."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbe.algorithms.vote import Member, VoteRule, get_vote_rule, mean_vote
from fedbe.core import plugins
from fedbe.core.compute import Plan
from fedbe.core.devices import CPU
from fedbe.core.inputs import Batch, batches, map_batch
from fedbe.core.layout import Layout
from fedbe.core.metrics import Metrics, compute_metrics
from fedbe.core.model_runner import call_module, plain_layout, select_logits
from fedbe.core.random import generator
from fedbe.data import make_loader
from fedbe.data.dataset import Shape, shape_text
from fedbe.data.readers.images import MAX_PIXELS, UNREADABLE_IMAGE, eight_bit, open_image
from fedbe.errors import DataError, FedBEError, RunError, SettingError
from fedbe.experiment.federation import Federation, ModelSpec, is_image, is_shipped
from fedbe.experiment.run_folder import MODEL_FILE, read_recipe, write_model
from fedbe.experiment.tensor_files import UNREADABLE, part, read_tensors


class VotingModel(nn.Module):
    """Several models as one.

    Its output is the logarithm of the members' combined probabilities; softmax turns it back into these.

    Args:
        members: The models; each maps inputs to logits [N, classes].
        rule: How their probabilities are combined.
        output: Which part of a member's output are the logits; see `ModelRunner`.
    """

    def __init__(
        self, members: Sequence[nn.Module], rule: VoteRule = mean_vote, output: str | int | None = None
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self._rule, self._output = rule, output

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Log-probabilities [N, classes, …] of normalised inputs."""
        outputs = (select_logits(member(*inputs, **named), self._output) for member in self.members)
        return self._rule(logits.softmax(1) for logits in outputs).log()


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """The final model of a run with what is needed to use it.

    Attributes:
        module: The network in evaluation mode; it takes normalised inputs.
        spec: Its architecture.
        classes: The names of the classes.
        mean: The mean of each channel (or of all numbers of a vector), for normalisation.
        std: The standard deviation, likewise.
    """

    module: nn.Module
    spec: ModelSpec
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor

    @torch.no_grad()
    def predict_proba(self, inputs: Batch) -> Tensor:
        """Probabilities [N, classes, …] of raw inputs, in a form of `fedbe.data.Dataset`, on the host.

        Raises:
            DataError: The inputs have another shape than the model takes.
        """
        if isinstance(inputs, Tensor) and inputs.dtype == torch.int64 and is_shipped(self.spec.name):
            inputs = inputs.float()
        device = next(self.module.parameters()).device
        loader = make_loader(inputs, mean=self.mean, std=self.std).placed(lambda tensor: tensor.to(device))
        if loader.shape != self.spec.shape:
            raise DataError(
                f"the model takes inputs of shape {shape_text(self.spec.shape)}, got {shape_text(loader.shape)}"
            )
        parts = [self._logits(loader.batch(index)).softmax(1) for index in batches(len(loader), 250)]
        return torch.cat(parts).cpu()

    def _logits(self, batch: Batch) -> Tensor:
        # Not every module takes the loader's channels-last.
        plain = map_batch(lambda tensor: plain_layout(tensor) if tensor.dim() == 4 else tensor, batch)
        output = None if isinstance(self.module, VotingModel) else self.spec.output  # a vote is one tensor
        logits: Tensor = select_logits(call_module(self.module, plain), output)
        return logits

    def metrics(self, inputs: Batch, labels: Tensor) -> Metrics:
        """Metrics of the predictions for raw inputs."""
        return compute_metrics(self.predict_proba(inputs), labels)


def save(folder: Path, members: Sequence[Member], layout: Layout, federation: Federation, vote: str = "mean") -> None:
    """Write the final model as one file that needs nothing else but fedbe.

    Args:
        folder: The run folder.
        members: The model; or several, whose vote is the prediction.
        layout: The names of the tensors.
        federation: Gives the architecture, the classes and the normalisation.
        vote: The name of the vote rule of several members.
    """
    tensors: dict[str, Tensor] = {}
    for i, member in enumerate(members):
        prefix = f"member{i}." if len(members) > 1 else ""
        tensors |= {prefix + name: t for name, t in layout.with_frozen(layout.unpack(member.state)).items()}
    # A model file names no code: that of a model of the user is in the recipe.
    spec = federation.model if is_shipped(federation.model.name) else replace(federation.model, name="", settings={})
    header = {
        "model": asdict(spec),
        "classes": list(federation.classes),
        "mean": federation.train.mean.tolist(),
        "std": federation.train.std.tolist(),
        "members": len(members),
        "vote": vote,
    }
    write_model(folder, header, tensors)


def load_trained_model(folder: str | Path, device: str = "cpu") -> TrainedModel:
    """Load the final model of a run, for raw inputs.

    Args:
        folder: The run folder.
        device: Where the model computes; see `Plan`.

    Raises:
        RunError: The run has no final model, or the file does not fit the architecture.
        SettingError: The device is not there.

    Example:
        load_trained_model("runs/NAME").predict_proba(images)
    """
    path = Path(folder) / MODEL_FILE
    if not path.is_file():
        resume = f"`fedbe resume {shlex.quote(str(folder))}`"
        raise RunError(f"{folder} has no {MODEL_FILE}: it is not a run folder, or the run is not finished ({resume})")
    try:
        header, tensors = read_tensors(path)
        _check_header(header)
        spec = _spec(Path(folder), header["model"])
        mean, std = (torch.tensor(header[name], dtype=torch.float32) for name in ("mean", "std"))
        module = _module(spec, tensors, header["members"], header.get("vote", "mean"))
        if len(header["classes"]) != spec.classes:
            raise ValueError(f"its header has {len(header['classes'])} names of {spec.classes} classes")
    except FedBEError as error:
        if isinstance(error, SettingError):  # of the header: no network can be made of it
            raise RunError(f"{path} does not fit '{spec.name}' as it is now: {error}") from error
        raise
    except UNREADABLE as error:
        advice = f"`fedbe resume {shlex.quote(str(folder))}` writes it again, if the checkpoints are there"
        raise RunError(f"{path} is damaged ({error}): {advice}") from error
    except RuntimeError as error:
        problem = str(error).splitlines()[-1].strip()
        raise RunError(f"{path} does not fit '{spec.name}' as it is now: {problem}") from error
    return TrainedModel(
        module=module.to(Plan(device=device).compute_device(CPU)),
        spec=spec,
        classes=tuple(header["classes"]),
        mean=mean,
        std=std,
    )


def _check_header(header: Mapping[str, Any]) -> None:
    """A ValueError that says what is wrong with the header of a model file."""
    if missing := [name for name in ("model", "classes", "mean", "std", "members") if name not in header]:
        raise ValueError(f"its header has no '{missing[0]}'")
    classes, members = header["classes"], header["members"]
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"its `classes` must be a list of names, got {str(classes)[:80]}")
    if type(members) is not int or members < 1:
        raise ValueError(f"its `members` must be a whole number >= 1, got {str(members)[:80]}")


def _shape(value: Any) -> Shape:
    """The shape of an input from JSON, which has lists for tuples."""
    if isinstance(value, dict):
        return {name: tuple(sizes) for name, sizes in value.items()}
    return tuple(tuple(size) if isinstance(size, list) else size for size in value)


def _spec(folder: Path, model: Mapping[str, Any]) -> ModelSpec:
    """The architecture: a network of fedbe, or the function that the recipe names. What a file names is not run."""
    name, settings, output = model["name"], model["settings"], None  # fedbe's own networks return logits only
    if not name or not is_shipped(name):
        recipe = read_recipe(folder).model
        if is_shipped(recipe.name):
            raise RunError(f"{folder / MODEL_FILE} needs a model of the user, but the recipe names '{recipe.name}'")
        name, settings, output = recipe.name, recipe.settings(), recipe.output
    return ModelSpec(name, model["classes"], _shape(model["shape"]), settings, output)


def load_model(folder: str | Path, *, trust: bool = False) -> nn.Module:
    """Load the final model of a run as a module in evaluation mode.

    Args:
        folder: The run folder.
        trust: Whether the function that the recipe names as its model may come from outside the current directory.

    Returns:
        The module. It takes normalised inputs and returns logits [N, classes].

    Raises:
        RunError: The run has no final model, or the file does not fit the architecture.

    Example:
        >>> model = load_model(folder)  # of `fedbe run swissroll --method fedavg`: points in the plane, three classes
        >>> model(torch.zeros(5, 2)).shape
        torch.Size([5, 3])
    """
    if trust:
        plugins.trust()
    return load_trained_model(folder).module


def _module(spec: ModelSpec, tensors: dict[str, Tensor], members: int, vote: str) -> nn.Module:
    modules = []
    for i in range(members):
        state = part(f"member{i}.", tensors) if members > 1 else tensors
        if is_shipped(spec.name):
            _check_shapes(spec, state)
        module = spec.build(generator(0))
        module.load_state_dict(state)
        modules.append(module)
    return (modules[0] if members == 1 else VotingModel(modules, get_vote_rule(vote), spec.output)).eval()


def _check_shapes(spec: ModelSpec, state: Mapping[str, Tensor]) -> None:
    """A RuntimeError unless the tensors fit the network, before memory is taken for its weights."""
    source = generator(0)
    with torch.device("meta"):
        expected = {name: list(tensor.shape) for name, tensor in spec.build(source).state_dict().items()}
    received = {name: list(tensor.shape) for name, tensor in state.items()}
    for name in expected | received:
        if expected.get(name) != received.get(name):
            raise RuntimeError(
                f"'{name}' must be {expected.get(name, 'missing')} and is {received.get(name, 'missing')}"
            )


def check_takes_images(shape: Shape) -> tuple[int, int, int]:
    """The shape (channels, height, width) of a model that takes image files; a DataError for another model."""
    if not is_image(shape):
        raise DataError(f"this model takes inputs of shape {shape_text(shape)}, not images")
    if shape[0] not in (1, 3):
        raise DataError(f"this model takes images of {shape[0]} channels, image files have 1 or 3: use it in Python")
    if shape[1] * shape[2] > MAX_PIXELS:
        raise DataError(
            f"this model takes images of {shape[1]} × {shape[2]} pixels, more than {MAX_PIXELS:,}: use it in Python"
        )
    return shape


def read_image(path: Path, shape: Shape) -> Tensor:
    """Read an image file as uint8 [1, H, W, C], resized to what the model takes.

    Args:
        path: The file.
        shape: The shape of the model's inputs, (channels, height, width).

    Raises:
        DataError: The file is missing or is not an image, or the model does not take images.
    """
    channels, height, width = check_takes_images(shape)
    try:
        with open_image(path) as image:
            fitted = eight_bit(image).convert("L" if channels == 1 else "RGB").resize((width, height))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except UNREADABLE_IMAGE as error:
        raise DataError(f"{path} is not an image that can be read: {error}") from error
    return torch.from_numpy(np.asarray(fitted).reshape(1, height, width, channels).copy())

"""Use a finished run: its model in Python, its accuracy, its predictions for images."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fedbe.algorithms.vote import Member, mean_vote
from fedbe.core.inputs import batches
from fedbe.core.metrics import Metrics, compute_metrics
from fedbe.core.random import generator
from fedbe.core.state import Layout
from fedbe.data import BatchLoader
from fedbe.data.readers.images import UNREADABLE_IMAGE, eight_bit
from fedbe.errors import DataError, RunError
from fedbe.experiment.federation import Federation, ModelSpec
from fedbe.experiment.run_folder import MODEL_FILE, write_model
from fedbe.experiment.tensor_files import UNREADABLE, read_tensors


class Voting(nn.Module):
    """Several models as one: the logarithm of their mean probabilities, which softmax turns back into the vote."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        return mean_vote(member(x).softmax(1) for member in self.members).log()


@dataclass(frozen=True, eq=False)
class Loaded:
    """A trained model with all that is needed to ask it: how inputs are normalised, what the classes are called."""

    module: nn.Module
    spec: ModelSpec
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor

    @torch.no_grad()
    def probabilities(self, inputs: Tensor) -> Tensor:
        """For raw inputs: uint8 [N, H, W, C] images or float32 [N, D] vectors."""
        feed = BatchLoader(inputs, mean=self.mean, std=self.std)
        if feed.shape != self.spec.shape:
            raise DataError(f"the model takes inputs of shape {list(self.spec.shape)}, got {list(feed.shape)}")
        parts = [self.module(feed.batch(index)).softmax(1) for index in batches(len(feed), 250)]
        return torch.cat(parts)

    def metrics(self, inputs: Tensor, labels: Tensor) -> Metrics:
        return compute_metrics(self.probabilities(inputs), labels)


def save(folder: Path, states: Sequence[Member], layout: Layout, federation: Federation) -> None:
    """Write the final model (several, where members vote) as one file that needs nothing else but fedbe."""
    tensors: dict[str, Tensor] = {}
    for i, member in enumerate(states):
        prefix = f"member{i}." if len(states) > 1 else ""
        tensors |= {prefix + name: t for name, t in layout.unpack(member.state).items()}
    about = {
        "model": asdict(federation.model),
        "classes": list(federation.classes),
        "mean": federation.train.mean.tolist(),
        "std": federation.train.std.tolist(),
        "members": len(states),
    }
    write_model(folder, about, tensors)


def open_run(folder: str | Path) -> Loaded:
    """The final model of a run, with all that is needed to ask it."""
    path = Path(folder) / MODEL_FILE
    if not path.is_file():
        again = shlex.quote(str(folder))
        raise RunError(f"{folder} has no {MODEL_FILE}: it is no run, or not finished (`fedbe resume {again}`)")
    try:
        about, tensors = read_tensors(path)
        model = about["model"]
        spec = ModelSpec(model["name"], model["classes"], tuple(model["shape"]), model["settings"])
        module = _module(spec, tensors, about["members"])
    except UNREADABLE as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    except RuntimeError as error:
        raise RunError(
            f"{path} does not fit '{spec.name}' as it is now: {str(error).splitlines()[-1].strip()}"
        ) from error
    return Loaded(
        module=module,
        spec=spec,
        classes=tuple(about["classes"]),
        mean=torch.tensor(about["mean"]),
        std=torch.tensor(about["std"]),
    )


def load_model(folder: str | Path) -> nn.Module:
    """The final model of a run as a module in evaluation mode; it takes normalised inputs."""
    return open_run(folder).module


def _module(spec: ModelSpec, tensors: dict[str, Tensor], members: int) -> nn.Module:
    modules = []
    for i in range(members):
        prefix = f"member{i}." if members > 1 else ""
        module = spec.build(generator(0))
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        module.load_state_dict(own)
        modules.append(module)
    return (modules[0] if members == 1 else Voting(modules)).eval()


def read_images(paths: Sequence[Path], shape: tuple[int, ...]) -> Tensor:
    """Image files as uint8 [N, H, W, C], resized to what the model takes."""
    if len(shape) != 3:
        raise DataError(f"this model takes vectors of {shape[0]} numbers, not images")
    channels, height, width = shape
    if channels not in (1, 3):
        raise DataError(f"this model takes images of {channels} channels, image files have 1 or 3: use it in Python")
    rows = []
    for path in paths:
        try:
            with Image.open(path) as image:
                fitted = eight_bit(image).convert("L" if channels == 1 else "RGB").resize((width, height))
        except FileNotFoundError:
            raise DataError(f"{path} does not exist") from None
        except UNREADABLE_IMAGE as error:
            raise DataError(f"{path} is not an image that can be read: {error}") from error
        rows.append(np.asarray(fitted).reshape(height, width, channels))
    return torch.from_numpy(np.stack(rows))

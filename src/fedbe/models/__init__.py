"""The paper's networks. `build(name, classes, shape, generator)` makes one; `MODELS` lists the names."""

from fedbe.models.build import MODELS, build

__all__ = ["MODELS", "build"]

"""The paper's networks. `build(name, classes, shape, …)` makes one with seeded weights."""

from fedbe.models.build import MODELS, build

__all__ = ["MODELS", "build"]

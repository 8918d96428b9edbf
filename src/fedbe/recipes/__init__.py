"""Recipes: an experiment as a TOML file."""

from fedbe.recipes.load import available, load, override
from fedbe.recipes.schema import Recipe

__all__ = ["Recipe", "available", "load", "override"]

"""Data, split and network: those of a recipe of fedbe, so that the result is that of `fedbe run`."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from fedbe.experiment.federation import Federation, prepare
from fedbe.experiment.recipe import Recipe
from fedbe.experiment.recipe_files import load_recipe

KEYS = ("recipe", "rounds", "epochs", "clients", "changes")


def get_recipe(config: Mapping[str, Any]) -> Recipe:
    """The recipe as in the paper, with the run's sizes and further changes (KEY=VALUE, separated by spaces)."""
    return _recipe(*(config[key] for key in KEYS))


def load_federation(config: Mapping[str, Any]) -> Federation:
    """All data, divided among the server and the clients: a function of the run's configuration."""
    return _federation(int(config["seed"]), *(config[key] for key in KEYS))


@cache
def _recipe(name: str, rounds: int, epochs: int, clients: int, changes: str) -> Recipe:
    sizes = (f"training.rounds={rounds}", f"training.epochs={epochs}", f"split.clients={clients}")
    return load_recipe(name, ["variant=paper", *sizes, *changes.split()])


@cache
def _federation(seed: int, *settings: Any) -> Federation:
    return prepare(_recipe(*settings), seed)

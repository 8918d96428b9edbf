"""The federation of the tests: the digits of a recipe, the same as in `fedbe run`."""

from functools import cache

from fedbe.experiment.federation import initial_weights, prepare
from fedbe.experiment.recipe_files import load_recipe
from fedbe.experiment.simulation import Simulation

SEED, CLIENTS = 5, 4
SETTINGS = (
    "training.rounds=3",
    "training.epochs=2",
    "training.one_round_epochs=3",
    f"split.clients={CLIENTS}",
    "training.clients_per_round=3",
    "model.hidden=[16]",
    "settings.distill_epochs=2",
    "settings.num_samples=3",
)


@cache
def recipe():
    return load_recipe("digits", SETTINGS)


@cache
def federation():
    return prepare(recipe(), SEED)


def model():
    return initial_weights(federation().model, SEED)


def server_inputs():
    return federation().server


def simulation(method):
    return Simulation(recipe(), recipe().method_for(method), SEED, federation(), None, None)

"""`fedbe methods`, `fedbe recipes` and `fedbe show`: what can be run."""

import typer

from fedbe.cli.console import out, plain_table
from fedbe.cli.options import Overrides, RecipeName


def methods() -> None:
    """List all methods."""
    from fedbe.algorithms.methods import METHODS

    table = plain_table("name", "method", "what it does")
    for method in METHODS.values():
        table.add_row(method.name, method.title, method.summary)
    out.print(table)


def recipes() -> None:
    """List the recipes that come with fedbe."""
    from fedbe.experiment.recipe_files import available_recipes, load_recipe

    table = plain_table("name", "what it is")
    for name in available_recipes():
        table.add_row(name, load_recipe(name).summary)
    out.print(table)


def show(recipe: RecipeName = "digits", changes: Overrides = None) -> None:
    """Print all settings of a recipe as TOML.

    The output is a recipe. Its comments list the resolved settings of the method.
    """
    import tomli_w

    from fedbe.experiment.recipe_files import dump_recipe, load_recipe

    settings = load_recipe(recipe, changes or ())
    method = settings.method_for()
    typer.echo(tomli_w.dumps(dump_recipe(settings) | {"limits": settings.limits.model_dump(mode="json")}))
    if settings.limits.client_weights == "declared":
        typer.echo('# The server knows the sizes of the split; max_share and max_size_ratio cap only "reported".')
    typer.echo(f"# {method.title} runs with these settings (recipe first, then variant, then defaults):")
    for line in tomli_w.dumps(method.settings()).splitlines():
        typer.echo(f"# {line}")

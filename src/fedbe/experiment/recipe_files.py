"""Find, read and change recipes. Every problem is reported in one sentence."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedbe.errors import RecipeError, nearest
from fedbe.experiment.recipe import GuardLimits, Recipe

SHIPPED = Path(__file__).parent / "recipes"

# Old names of settings. Recipes on disk and --set may still use them; nothing else in the package knows them.
RENAMED_SETTINGS = {
    "samples": "num_samples",
    "mu": "proximal_mu",
    "server_epochs": "distill_epochs",
    "server_batch": "distill_batch_size",
    "server_lr": "distill_lr",
    "server_lr_min": "distill_lr_min",
    "server_momentum": "distill_momentum",
    "server_weight_decay": "distill_weight_decay",
}
RENAMED_TRAINING = {"batch": "batch_size"}


def available_recipes() -> dict[str, Path]:
    """The recipes that come with fedbe, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def load_recipe(source: str | Path, changes: Iterable[str] = ()) -> Recipe:
    """Load a recipe.

    Args:
        source: The name of a shipped recipe, or a TOML file.
        changes: Settings that win over the recipe's, like "training.rounds=20"; "split.alpha=" unsets a setting.

    Raises:
        RecipeError: There is no such recipe, or a setting is unknown or has a wrong value.

    Example:
        >>> load_recipe("digits", ["training.rounds=20"]).training.rounds
        20
    """
    path = available_recipes().get(str(source), Path(source))
    if not path.is_file():
        hint = nearest(str(source), available_recipes())
        raise RecipeError(f"no recipe '{source}', and no TOML file of that name: {hint}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # a ValueError is also wrong UTF-8, or a number of 5,000 digits
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    values.setdefault("name", path.stem)
    return _recipe(values, changes, str(source))


def override_recipe(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """The same recipe with some settings changed; see `load_recipe`."""
    return _recipe(dump_recipe(recipe), changes, recipe.name)


def dump_recipe(recipe: Recipe) -> dict[str, Any]:
    """All settings as plain values for TOML or JSON. Settings that are not set are left out (TOML has no null).

    Default limits are left out, too: recipes from before there were limits keep their identity.
    """
    default_limits = {"limits"} if recipe.limits == GuardLimits() else set()
    return recipe.model_dump(mode="json", exclude_none=True, exclude=default_limits)


def _recipe(values: Mapping[str, Any], changes: Iterable[str], source: str) -> Recipe:
    try:
        return Recipe.model_validate(_changed(_with_current_names(values), changes))
    except ValidationError as error:
        raise RecipeError(f"recipe {source}: {_sentence(error)}") from error
    except RecursionError as error:
        raise RecipeError(f"recipe {source}: its tables are nested too deeply") from error


def _current_name(path: Sequence[str], name: str) -> str:
    """Today's name of a setting in the table at `path`.

    >>> _current_name(["method_settings", "fedbe"], "samples"), _current_name(["model"], "samples")
    ('num_samples', 'samples')
    """
    match list(path):
        case ["training"]:
            return RENAMED_TRAINING.get(name, name)
        case ["settings"] | ["method_settings", _]:
            return RENAMED_SETTINGS.get(name, name)
        case _:
            return name


def _with_current_names(table: Mapping[str, Any], path: Sequence[str] = ()) -> dict[str, Any]:
    """A deep copy of a recipe's tables with today's names of settings.

    >>> _with_current_names({"settings": {"samples": 4}, "training": {"batch": 20}})
    {'settings': {'num_samples': 4}, 'training': {'batch_size': 20}}
    """
    result: dict[str, Any] = {}
    for name, value in table.items():
        current = _current_name(path, name)
        if current != name and current in table:
            old, new = ".".join([*path, name]), ".".join([*path, current])
            raise RecipeError(f"'{old}' is the old name of '{new}': give only one of them")
        result[current] = _with_current_names(value, [*path, name]) if isinstance(value, Mapping) else value
    return result


def _changed(values: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Apply changes to the values of a recipe, in place."""
    parsed = [_parsed(change) for change in changes]
    split = values.get("split", {})
    new_kinds = [text for path, text in parsed if path == ["split", "kind"]]
    if isinstance(split, dict) and any(kind != split.get("kind") for kind in new_kinds):
        values["split"] = {k: v for k, v in split.items() if k == "clients"}  # the rest belongs to the old kind
    model = values.get("model", {})
    new_names = [text for path, text in parsed if path == ["model", "name"]]
    if isinstance(model, dict) and any(name != model.get("name") for name in new_names):
        values["model"] = {}  # its settings belong to the old network
    for path, text in parsed:
        _set(values, path, text)
    return values


def _parsed(change: str) -> tuple[list[str], str]:
    """The path of a setting, with today's name, and its new value as text."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"a change must look like training.rounds=20, got '{change}'")
    *tables, name = key.strip().split(".")
    return [*tables, _current_name(tables, name)], text.strip()


def _set(values: dict[str, Any], path: list[str], text: str) -> None:
    table = values
    for name in path[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"cannot set '{'.'.join(path)}': '{name}' is a value, not a table")
    if text:
        table[path[-1]] = _value(text)
    else:
        table.pop(path[-1], None)


def _value(text: str) -> Any:
    """Parse a TOML value. Other text is taken as a string, so that names need no quotes."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return text


def _sentence(error: ValidationError) -> str:
    """The first problem, with the nearest valid name for an unknown one."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"] if not _is_type_tag(part))
    if first["type"] == "extra_forbidden":
        return f"unknown setting '{path}': {nearest(str(first['loc'][-1]), _names(first['loc'][:-1]))}"
    message = str(first["msg"]).removeprefix("Value error, ")
    if not path or first["type"] == "value_error":
        return message
    return f"'{path}': {message[0].lower()}{message[1:]}, got {first['input']!r}"


def _is_type_tag(part: int | str) -> bool:
    # pydantic adds the branch of a union to the path; users need not see it.
    return isinstance(part, str) and ("[" in part or part in ("int", "tuple", "constrained-int"))


def _names(path: tuple[int | str, ...]) -> list[str]:
    """The valid names in the table at `path`."""
    model: type[BaseModel] = Recipe
    for part in path:
        inner = model.model_fields[str(part)].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return list(model.model_fields)

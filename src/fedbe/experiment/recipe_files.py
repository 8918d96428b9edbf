"""Find, read and change recipes; every problem is one sentence."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedbe.errors import RecipeError, nearest
from fedbe.experiment.recipe import Recipe

SHIPPED = Path(__file__).parent / "recipes"
# Settings that were renamed: recipes on disk keep working under the old names. A path, then the new last part.
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
    """A shipped recipe by name, or a TOML file; `changes` are like "training.rounds=20", or "split.alpha=" to unset."""
    path = available_recipes().get(str(source), Path(source))
    if not path.is_file():
        raise RecipeError(f"no recipe '{source}': {nearest(str(source), available_recipes())} or give a TOML file")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    values.setdefault("name", path.stem)
    return validate(_changed(values, changes), str(source))


def override_recipe(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """The same recipe with some settings changed."""
    return validate(_changed(dump_recipe(recipe), changes), recipe.name)


def dump_recipe(recipe: Recipe) -> dict[str, Any]:
    """All settings as plain values, without those that are not set (TOML has no null)."""
    return recipe.model_dump(mode="json", exclude_none=True)


def validate(values: Mapping[str, Any], what: str) -> Recipe:
    try:
        return Recipe.model_validate(_renamed(values))
    except ValidationError as error:
        raise RecipeError(f"recipe {what}: {_sentence(error)}") from error


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same recipe with today's names for settings that were renamed.

    >>> _renamed({"settings": {"samples": 4}, "training": {"batch": 20}})
    {'settings': {'num_samples': 4}, 'training': {'batch_size': 20}}
    """
    result = dict(values)
    for table, names in (("settings", RENAMED_SETTINGS), ("training", RENAMED_TRAINING)):
        if isinstance(result.get(table), Mapping):
            result[table] = {names.get(k, k): v for k, v in result[table].items()}
    if isinstance(result.get("method_settings"), Mapping):
        result["method_settings"] = {
            method: {RENAMED_SETTINGS.get(k, k): v for k, v in own.items()} if isinstance(own, Mapping) else own
            for method, own in result["method_settings"].items()
        }
    return result


def _changed(values: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    result = _renamed(_copy(values))
    told = [_parsed(change) for change in changes]
    split = result.get("split", {})
    if isinstance(split, dict) and any(key == "split.kind" and text != split.get("kind") for key, text in told):
        result["split"] = {k: v for k, v in split.items() if k == "clients"}  # the rest is of the other kind
    for key, text in told:
        table, parts = result, key.split(".")
        for part in parts[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise RecipeError(f"cannot set '{key}': '{part}' is a value, not a table")
        if text:
            table[parts[-1]] = _value(text)
        else:
            table.pop(parts[-1], None)
    return result


def _parsed(change: str) -> tuple[str, str]:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"a change must look like training.rounds=20, got '{change}'")
    *tables, name = key.strip().split(".")
    if tables[:1] in (["settings"], ["method_settings"]):
        name = RENAMED_SETTINGS.get(name, name)
    elif tables == ["training"]:
        name = RENAMED_TRAINING.get(name, name)
    return ".".join([*tables, name]), text.strip()


def _copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def _value(text: str) -> Any:
    """A TOML value; text that is none is taken as a string, so that names need no quotes."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _sentence(error: ValidationError) -> str:
    """The first problem, with the nearest valid name for an unknown one."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"] if not _is_type_tag(part))
    if first["type"] == "extra_forbidden":
        return f"unknown setting '{place}': {nearest(str(first['loc'][-1]), _names(first['loc'][:-1]))}"
    message = str(first["msg"]).removeprefix("Value error, ")
    if not place or first["type"] == "value_error":
        return message
    return f"'{place}': {message[0].lower()}{message[1:]}, got {first['input']!r}"


def _is_type_tag(part: int | str) -> bool:
    # pydantic adds the branch of a union to the place; it says nothing to a user.
    return isinstance(part, str) and ("[" in part or part in ("int", "tuple", "constrained-int"))


def _names(place: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in place:
        inner = model.model_fields[str(part)].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return list(model.model_fields)

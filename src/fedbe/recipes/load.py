"""Find, read and change recipes; every problem is one sentence."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedbe.errors import RecipeError, nearest
from fedbe.recipes.schema import Recipe

SHIPPED = Path(__file__).parent


def available() -> dict[str, Path]:
    """The recipes that come with fedbe, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def load(source: str | Path, changes: Iterable[str] = ()) -> Recipe:
    """A shipped recipe by name, or a TOML file; `changes` are like "training.rounds=20", or "split.alpha=" to unset."""
    path = available().get(str(source), Path(source))
    if not path.is_file():
        raise RecipeError(f"no recipe '{source}': {nearest(str(source), available())} or give a TOML file")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    values.setdefault("name", path.stem)
    return validate(_changed(values, changes), str(source))


def override(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """The same recipe with some settings changed."""
    return validate(_changed(dump(recipe), changes), recipe.name)


def dump(recipe: Recipe) -> dict[str, Any]:
    """All settings as plain values, without those that are not set (TOML has no null)."""
    return recipe.model_dump(mode="json", exclude_none=True)


def validate(values: Mapping[str, Any], what: str) -> Recipe:
    try:
        return Recipe.model_validate(dict(values))
    except ValidationError as error:
        raise RecipeError(f"recipe {what}: {_sentence(error)}") from error


def _changed(values: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    result = _copy(values)
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
    return key.strip(), text.strip()


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

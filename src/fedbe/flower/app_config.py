"""The settings of a Flower app: those in its pyproject.toml, and the values of `--set KEY=VALUE`."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbe.errors import RunError, SettingError, check_settings

Value = str | int | float | bool  # the types that Flower accepts for a setting


def parse_overrides(settings: Sequence[str]) -> dict[str, str]:
    """Split texts KEY=VALUE.

    Raises:
        SettingError: a text has no "=".

    Example:
        >>> parse_overrides(["rounds=5", "title=a=b"])
        {'rounds': '5', 'title': 'a=b'}
    """
    if wrong := [text for text in settings if "=" not in text]:
        raise SettingError(f"a setting must be KEY=VALUE, got '{wrong[0]}'")
    return dict(text.split("=", 1) for text in settings)


def convert_overrides(app: Path, overrides: Mapping[str, str]) -> dict[str, Value]:
    """Convert overrides to the types that the settings have in the app's pyproject.toml.

    Checked here, because Flower passes an unknown name or a text in place of a number to the app's server, which fails.

    Raises:
        RunError: the folder is not a Flower app, or its configuration has no `folder`.
        SettingError: a setting is unknown or has another type.
    """
    defaults = _read_defaults(app)
    if "folder" not in defaults:
        raise RunError(
            f'{app / "pyproject.toml"} has no `folder = ""` in [tool.flwr.app.config]: the app needs this setting to '
            "know where its results go"
        )
    check_settings("the app", overrides, defaults)
    return {key: convert_value(key, text, defaults[key]) for key, text in overrides.items()}


def convert_value(key: str, text: str, default: Value) -> Value:
    """Convert a text to the type of `default`: a bool, a number, or a text with or without quotes.

    Example:
        >>> convert_value("fraction", ".5", 1.0), convert_value("rounds", "5", 3)
        (0.5, 5)
        >>> convert_value("tag", "007", ""), convert_value("tag", '"a b"', "")
        ('007', 'a b')
    """
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise SettingError(f"`{key}` must be true or false, got '{text}'")
        return text == "true"
    if isinstance(default, int | float):
        is_whole = text.removeprefix("-").isdecimal()
        try:
            return int(text) if is_whole and not isinstance(default, float) else float(text)
        except ValueError:
            raise SettingError(f"`{key}` must be a number, got '{text}'") from None
    return _unquoted(text)


def _unquoted(text: str) -> str:
    """The content of a TOML string; any other text as it is."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = table["value"]
    return value if len(table) == 1 and isinstance(value, str) else text


def _read_defaults(app: Path) -> dict[str, Value]:
    """The settings in an app's pyproject.toml; nested tables as table.name, as Flower names them."""
    path = app / "pyproject.toml"
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"].get("config", {})
        return dict(_flatten(config))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not the pyproject.toml of a Flower app: {error}") from error


def _flatten(table: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", v) for inner, v in _flatten(value))
        else:
            yield key, value

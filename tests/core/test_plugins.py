"""Functions of the user, named as module:function."""

import hashlib
import importlib.abc
import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

from fedbe import DataError
from fedbe.core import plugins
from fedbe.core.plugins import call_function, load_function, source_digest

SOURCE = """
value = 3


def double(x):
    return 2 * x


def fail(x):
    raise KeyError(x)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    """The module `users_module` in the current directory, which is not yet on the path."""
    (tmp_path / "users_module.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield
    sys.modules.pop("users_module", None)


def test_a_function_of_the_current_directory():
    assert load_function("users_module:double", DataError)(4) == 8
    assert call_function("users_module:double", DataError, x=5) == 10


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("users_module:none", "no attribute 'none'"),
        ("no_module:f", "but no module named"),
        ("users_module:value", "is a int"),
    ],
)
def test_names_without_a_function(path, message):
    with pytest.raises(DataError, match=f"'{path}' must name a function.*{message}"):
        load_function(path, DataError)


def test_a_function_that_fails_is_named():
    with pytest.raises(DataError, match="'users_module:fail' failed with KeyError"):
        call_function("users_module:fail", DataError, x=1)


@pytest.mark.parametrize("path", ["torch.hub:load", "os:system", "subprocess:run", "builtins:exec", "numpy:load"])
def test_code_from_elsewhere_is_not_run_unless_the_user_says_so(path, monkeypatch):
    with pytest.raises(DataError, match=f"'{path}' would run code from .* give --trust"):
        load_function(path, DataError)
    monkeypatch.setattr(plugins, "trusts_all", False)  # undone after the test
    plugins.trust()
    assert callable(load_function(path, DataError))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module in another folder, as editable installs do."""

    def __init__(self, file):
        self.file = file

    def find_spec(self, name, path=None, target=None):  # noqa: ARG002
        return importlib.util.spec_from_file_location(name, self.file) if name == self.file.stem else None


def test_code_that_only_a_finder_knows_is_not_run(tmp_path, tmp_path_factory, monkeypatch):
    module = tmp_path_factory.mktemp("elsewhere") / "found_elsewhere.py"
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(): pass\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, _Finder(module)])
    with pytest.raises(DataError, match=r"would run code from .*found_elsewhere\.py"):
        load_function("found_elsewhere:f", DataError)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", [None, "/usr/lib/other.py"])
def test_a_loaded_module_without_a_spec_is_not_the_project(file, monkeypatch):
    module = types.ModuleType("loaded_module")
    module.f, module.__file__ = print, file
    monkeypatch.setitem(sys.modules, "loaded_module", module)
    with pytest.raises(DataError, match="would run code from"):
        load_function("loaded_module:f", DataError)


def test_an_environment_in_the_project_is_not_the_project(tmp_path, monkeypatch):
    """A virtual environment below the current directory has the code of others."""
    packages = tmp_path / ".venv" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "others_module.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(packages)
    with pytest.raises(DataError, match="would run code from"):
        load_function("others_module:f", DataError)


@pytest.mark.parametrize("folder", ["/", str(Path(os.__file__).parents[1]), str(Path(os.__file__).parent)])
@pytest.mark.parametrize("path", ["os:system", "shutil:rmtree", "torch.hub:load"])
def test_python_s_own_modules_are_never_the_project(folder, path, monkeypatch):
    """The current directory may be above the interpreter, as in a container that works in `/`."""
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=f"'{path}' would run code from .* give --trust"):
        load_function(path, DataError)


@pytest.mark.parametrize("name", ["run", "system", "part", "Path", "caller"])
def test_what_a_module_has_imported_is_not_its_own(name, tmp_path, monkeypatch):
    lines = (
        "import functools, os, operator", "from subprocess import run", "from os import system",
        "from pathlib import Path", "part = functools.partial(run, 'id')", "caller = operator.methodcaller('x')",
    )  # fmt: skip
    (tmp_path / "users_module.py").write_text("\n".join(lines))
    with pytest.raises(DataError, match=f"'users_module:{name}' is code of '.*write a function there .* --trust"):
        load_function(f"users_module:{name}", DataError)
    monkeypatch.setattr(plugins, "trusts_all", True)
    assert callable(load_function(f"users_module:{name}", DataError))


def test_decorated_functions_classes_and_their_instances_are_its_own(tmp_path):
    lines = (
        "import functools, torch", "@torch.no_grad()", "def a(): return 1", "@functools.cache", "def b(): return 1",
        "class C:", "    def __call__(self): return 1", "d = C()", "e = d.__call__", "f = functools.partial(b)",
    )  # fmt: skip
    (tmp_path / "users_module.py").write_text("\n".join(lines))
    assert [call_function(f"users_module:{name}", DataError) for name in "abdef"] == [1] * 5
    assert callable(load_function("users_module:C", DataError))


def test_the_digest_is_that_of_the_source_file():
    load_function("users_module:double", DataError)
    assert source_digest("users_module:double") == hashlib.sha256(SOURCE.encode()).hexdigest()[:16]
    assert source_digest("builtins:len") == "builtins:len"

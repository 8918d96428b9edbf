"""The wheel and the source archive work without the checkout: installed next to what they declare, they run."""

import importlib.util
import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from benchmarks import licences

ROOT = Path(__file__).parents[2]
SCRIPT = """
import fedbe, importlib.util, sys
assert "site-packages" in fedbe.__file__ and sys.prefix in fedbe.__file__, fedbe.__file__
assert importlib.util.find_spec("pytest") is None
"""
QUICK = ["--set", "training.rounds=1", "--set", "training.epochs=1", "--workers", "1", "-q"]
STUDIES = """
from fedbe.reproduce.study import available_studies, load_study
for name in sorted(available_studies()):
    load_study(name)
    print(name)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("hatchling") is None,
        reason="needs hatchling: pip install -c constraints.txt -e '.[dev]'",
    ),
]


def run(*words, cwd):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the source archive, and with the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    run("tar", "xzf", archive, cwd=folder)
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    return folder


@pytest.fixture
def install(tmp_path):
    """install(archive, *extras): the Python of an environment with the archive and what it declares, no more."""

    def new(archive, *extras):
        venv.create(tmp_path / "env", with_pip=False)
        site = tmp_path / "env" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
        run(*pip, "--target", site, archive, cwd=tmp_path)
        for name in licences.needed(extras):
            package = distribution(name)
            for top in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(package.locate_file(top))
        return tmp_path / "env" / "bin" / "python"

    return new


def test_an_installed_wheel_runs(built, install, tmp_path):
    python = install(next(built.glob("*.whl")))
    run(python, "-c", SCRIPT, cwd=tmp_path)
    assert "test accuracy" in run(python, "-m", "fedbe", "run", "--method", "fedbe", *QUICK, cwd=tmp_path)
    page = run(python, "-m", "fedbe", "report", "runs/digits-fedbe-seed0", cwd=tmp_path)
    assert "report" in page
    assert "cifar10-step" in run(python, "-m", "fedbe", "recipes", cwd=tmp_path)
    shipped = run(python, "-c", STUDIES, cwd=tmp_path).split()
    assert shipped == sorted(path.stem for path in ROOT.glob("src/**/studies/*.toml"))
    template = next((tmp_path / "env").rglob("site-packages/fedbe/flower/example"))  # of `fedbe flower new`
    example = ROOT / "examples" / "flower"
    for file in (path for path in template.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        assert file.read_bytes() == (example / file.relative_to(template)).read_bytes()
    assert (template / "digits_app" / "server_app.py").is_file()


def test_an_installed_source_archive_runs(built, install, tmp_path):
    """With an extra: MLflow in its default store."""
    python = install(next(built.glob("*.tar.gz")), "mlflow")
    run(python, "-c", SCRIPT, cwd=tmp_path)
    run(python, "-m", "fedbe", "run", "--method", "fedavg", *QUICK, "--track", "mlflow", cwd=tmp_path)
    assert (tmp_path / "mlflow.db").stat().st_size > 0


def test_the_checkout_and_the_source_archive_make_the_same_wheel(built, tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    assert contents(next(tmp_path.glob("*.whl"))) == contents(next(built.glob("*.whl")))


def contents(wheel):
    """File name -> CRC of every file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {member.filename: member.CRC for member in archive.infolist()}


def test_the_source_archive_has_what_a_packager_needs(built):
    (source,) = (path for path in built.iterdir() if path.is_dir())
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "tests", "docs", "examples"):
        assert (source / name).exists(), name

"""The wheel and the source archive work without the checkout: installed, they run a federation."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import fedbe, sys
assert "site-packages" in fedbe.__file__ and sys.prefix in fedbe.__file__, fedbe.__file__
"""
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
        importlib.util.find_spec("hatchling") is None, reason="needs hatchling: pip install 'fedbe[dev]'"
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


def test_an_installed_wheel_runs(built, tmp_path):
    """The dependencies are those of this environment; fedbe itself comes from the wheel alone."""
    venv.create(tmp_path / "env", with_pip=False)
    site = tmp_path / "env" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    paths = [sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("site-packages"))]
    (site / "dependencies.pth").write_text("\n".join(dict.fromkeys(paths)))
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-c", SCRIPT, cwd=tmp_path)
    quick = ["--set", "training.rounds=1", "--set", "training.epochs=1", "--workers", "1", "-q"]
    assert "test accuracy" in run(python, "-m", "fedbe", "run", "--method", "fedbe", *quick, cwd=tmp_path)
    page = run(python, "-m", "fedbe", "report", "runs/digits-fedbe-seed0", cwd=tmp_path)
    assert "report" in page
    assert "cifar10-step" in run(python, "-m", "fedbe", "recipes", cwd=tmp_path)
    shipped = run(python, "-c", STUDIES, cwd=tmp_path).split()
    assert shipped == sorted(path.stem for path in ROOT.glob("src/**/studies/*.toml"))
    run(python, "-m", "fedbe", "flower", "new", "app", cwd=tmp_path)
    example = ROOT / "examples" / "flower"
    for made in (path for path in (tmp_path / "app").rglob("*") if path.is_file()):
        assert made.read_bytes() == (example / made.relative_to(tmp_path / "app")).read_bytes()
    assert (tmp_path / "app" / "digits_app" / "server_app.py").is_file()


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

"""Links and names in the documentation exist."""

import inspect
import re
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

from fedbe.algorithms.methods import get_method
from fedbe.posterior.base import Posterior

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "results/README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page):
    """The anchors of a page, as GitHub and mkdocs make them from its headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    plain = [re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if path.startswith("http"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def referenced(page):
    """The names that a page of the reference renders."""
    return re.findall(r"^::: (\S+)$", (ROOT / f"docs/{page}.md").read_text(encoding="utf-8"), re.M)


REFERENCE = [name for page in ("reference", "reference-data", "reference-engines") for name in referenced(page)]


def resolved(name):
    engine = next((extra for extra in ("flower", "nvflare") if name.startswith(f"fedbe.{extra}")), None)
    if engine:
        pytest.importorskip("flwr" if engine == "flower" else engine, reason=f"needs the extra fedbe[{engine}]")
    return resolve_name(name)


@pytest.mark.parametrize("name", REFERENCE)
def test_a_name_of_the_reference_exists_and_its_parameters_are_described(name):
    thing = resolved(name)
    text = inspect.getdoc(thing)
    assert text, f"{name} has no docstring"
    parameters = [] if not inspect.isclass(thing) and not inspect.isfunction(thing) else described(thing)
    if not re.search(r"the options of `Server`|see `MethodStrategy`", text):
        assert [p for p in parameters if not re.search(rf"^ +\*{{0,2}}{p}: ", text, re.M)] == []


def described(thing):
    """The parameters of a function or class; none of a protocol, an error or a posterior, which `fit` makes."""
    if inspect.isclass(thing) and (issubclass(thing, Exception | Posterior) or getattr(thing, "_is_protocol", False)):
        return []
    return inspect.signature(thing).parameters


@pytest.mark.parametrize(
    ("package", "page"),
    [
        ("fedbe", "reference"),
        ("fedbe.data", "reference-data"),
        ("fedbe.models", "reference-data"),
        ("fedbe.report", "reference-data"),
        ("fedbe.experiment.trackers", "reference-data"),
        ("fedbe.flower", "reference-engines"),
        ("fedbe.nvflare", "reference-engines"),
    ],
)
def test_every_public_name_is_in_the_reference(package, page):
    module = resolved(package)
    public = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (name == "TRACKERS" or getattr(value, "__module__", "") == package)
    ]
    listed = [resolved(name) for name in referenced(page)]
    assert public
    assert [name for name in public if not any(getattr(module, name) is one for one in listed)] == []


def test_the_versions_agree():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"  version = {{{version}}},\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_settings_of_other_programs_are_settings_of_ours():
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/others.md").read_text(encoding="utf-8"), re.S)
    names: dict[str, dict[str, dict[str, object]]] = {}
    exec(code[1], names)  # noqa: S102
    assert len(names["OTHERS"]) == 6
    for settings in names["OTHERS"].values():
        assert get_method("fedbe", **settings) != get_method("fedbe")


def imported_names(page):
    """The names of fedbe that the code of a page imports; for a module, its name."""
    code = "".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
    for package, names in re.findall(r"^from (fedbe[\w.]*) import (.*)$", code, re.M):
        yield from (f"{package}.{name.strip()}" for name in names.split(","))


ENGINES = ("fedbe.flower", "fedbe.nvflare")  # all their public names are in the reference, see above


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_names_that_a_page_imports_are_in_the_reference(page):
    """Concepts are left out: that page shows single steps of a vote."""
    listed = [resolved(name) for name in REFERENCE if not name.startswith(ENGINES)]
    for name in imported_names(page):
        if page.stem != "concepts" and not name.startswith(ENGINES):
            thing = resolved(name)
            has_names = inspect.ismodule(thing) and any(one.startswith(f"{thing.__name__}.") for one in REFERENCE)
            assert has_names or any(thing is one for one in listed), f"{page.name} imports {name}"


def test_nothing_says_to_install_from_a_package_index():
    """Until the first release there is nothing; then this test goes (CONTRIBUTING.md, release checklist)."""
    files = [*ROOT.glob("src/**/*.py"), *(ROOT / name for name in ("README.md", "baselines/fedbe/README.md"))]
    files += [path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.*") if path.suffix != ".png"]
    texts = {path: path.read_text(encoding="utf-8") for path in files if "__pycache__" not in path.parts}
    assert [path for path, text in texts.items() if re.search(r"pip install (-\S+ )*'?fedbe\b", text)] == []


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    assert set(re.findall(r"([\w-]+\.md)", navigation)) == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_pictures_are_those_that_our_code_draws():
    from benchmarks.concept_pictures import PICTURES

    assert {path.stem for path in (ROOT / "docs/pictures").iterdir()} == set(PICTURES)

"""Links and names in the documentation exist."""

import re
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest

import fedbe
from fedbe.algorithms.methods import get_method

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


def test_every_name_of_the_reference_exists():
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(encoding="utf-8"), re.M)
    assert names
    for name in names:
        assert resolve_name(name).__doc__, f"{name} has no docstring"


def test_every_public_name_is_in_the_reference():
    listed = {
        name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.M)
    }
    assert set(fedbe.__all__) <= listed


def test_the_versions_agree():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_settings_of_other_programs_are_settings_of_ours():
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/others.md").read_text(encoding="utf-8"), re.S)
    names: dict[str, dict[str, dict[str, object]]] = {}
    exec(code[1], names)  # noqa: S102
    assert len(names["OTHERS"]) == 6
    for settings in names["OTHERS"].values():
        assert get_method("fedbe", **settings) != get_method("fedbe")


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    assert set(re.findall(r"(\w+\.md)", navigation)) == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_the_pictures_are_those_that_our_code_draws():
    from benchmarks.concept_pictures import PICTURES

    assert {path.stem for path in (ROOT / "docs/pictures").iterdir()} == set(PICTURES)

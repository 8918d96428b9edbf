"""The page as text: self-contained, and safe with any text from files."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedbe.report import build_sections, read_groups, render, write_page
from fedbe.report.colours import LIGHT_DARK, OTHER

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Tags(HTMLParser):
    """Counts tags and collects the attributes that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.loads: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.loads += [(tag, v) for k, v in attrs if k in ("src", "href", "action") and not (v or "").startswith("#")]


def page_of(*folders: Path) -> str:
    return render(build_sections(read_groups(folders)))


def test_nothing_is_loaded_and_every_chart_has_its_table(comparison: Path) -> None:
    text = page_of(comparison)
    tags = Tags(text)
    assert tags.loads == []
    assert tags.count["figure"] == 9
    assert tags.count["table"] == 10
    assert tags.count["script"] == 2
    assert "default-src 'none'" in text
    assert re.search(r'<tr class="best" data-method="fedbe"><th scope="row">.*?FedBE</th><td>72\.0 ± 2\.8</td>', text)


def test_names_from_files_stay_text(make_run, recipe) -> None:
    # A recipe's name cannot have a slash: it becomes the name of a folder.
    named = recipe.model_copy(update={"name": EVIL.replace("/", ""), "summary": EVIL})
    folder = make_run("run <i>", "fedavg", [0.5, 0.6, 0.7], recipe=named)
    info = json.loads((folder / "run.json").read_text())
    info["made_with"]["machine"] = EVIL  # is also in the data of the charts
    (folder / "run.json").write_text(json.dumps(info))
    text = page_of(folder)
    tags = Tags(text)
    assert tags.count["script"] == 2
    assert "img" not in tags.count
    assert "i" not in tags.count
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in text
    _, data = text.split('id="data">')
    assert "\\u003c/script\\u003e" in data
    assert "<" not in data.split("</script>")[0]
    assert "run &lt;i&gt;" in text


def test_the_data_can_be_read_back(comparison: Path) -> None:
    text = page_of(comparison)
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    data = json.loads(match[1])
    chart = next(c for name, c in data["charts"].items() if name.endswith("-accuracy"))
    assert [s["label"] for s in chart["panels"][0]["series"]] == ["FedAvg", "FedBE"]
    assert chart["panels"][0]["series"][1]["points"][2]["y"] == pytest.approx(72)


def test_two_groups_have_contents_and_unique_ids(make_run, comparison: Path) -> None:
    text = page_of(comparison, make_run("single", "fedprox", [0.5]))
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert text.count('class="switch"') == 3
    assert '<a href="#s1-single">single</a>' in text


def test_the_page_is_written_whole(comparison: Path, tmp_path: Path) -> None:
    path = write_page(build_sections(read_groups([comparison])), tmp_path / "page.html", ["a & b"])
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert "a &amp; b" in path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.glob(".*")] == []


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("method", [*LIGHT_DARK, "other"])
def test_method_colours_can_be_read_as_text(method: str) -> None:
    """WCAG AA: contrast of 4.5 : 1 with the background, light or dark."""
    on_white, on_dark = LIGHT_DARK.get(method, OTHER)
    assert 1.05 / (_luminance(on_white) + 0.05) >= 4.5
    assert (_luminance(on_dark) + 0.05) / (_luminance("#16181b") + 0.05) >= 4.5


def test_every_method_of_the_catalogue_has_a_colour() -> None:
    from fedbe.algorithms.methods import METHODS

    assert set(LIGHT_DARK) == {*METHODS, "fedbe-tuned", "fedbe-auto"}  # plus rows of Table 1
    assert len(set(LIGHT_DARK.values())) == len(LIGHT_DARK)

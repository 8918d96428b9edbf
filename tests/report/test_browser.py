"""The page in a real Chromium: no errors, everything is drawn, and nothing is loaded from elsewhere."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbe.report import build_sections, read_groups, split_chart, write_page
from fedbe.report.live import Page as Watched
from fedbe.report.live import serve

from ..conftest import distilled

pytestmark = pytest.mark.e2e

EVIL = "</script><img src=x onerror=alert(2)>"


class Visit:
    """A page that records its errors and its requests."""

    def __init__(self, browser: Any, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.problems.append("a dialog"), dialog.dismiss()))

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    made: list[Visit] = []

    def make(**context: Any) -> Visit:
        made.append(Visit(browser, **context))
        return made[-1]

    yield make
    for one in made:
        one.context.close()


@pytest.fixture
def address(comparison: Path) -> str:
    return write_page(build_sections(read_groups([comparison])), comparison / "report.html").as_uri()


def test_it_loads_without_errors_and_draws_every_series(visit: Any, address: str) -> None:
    visited = visit()
    visited.page.goto(address)
    assert visited.count(".accuracy .series") == 2
    assert visited.count(".accuracy .band") == 2
    assert visited.count(".teachers .panel") == 2
    assert visited.count(".teachers .series") == 5
    assert visited.count(".confidence .dot") == 4
    assert visited.count(".memory .bar") == 6
    assert visited.count(".split .bubble") == 40
    assert visited.count("figure svg") == visited.count("figure .panel")
    assert visited.problems == []
    assert visited.requests == [address]


def test_a_method_can_be_hidden_and_shown(visit: Any, address: str) -> None:
    visited = visit()
    visited.page.goto(address)
    switch = visited.page.get_by_role("button", name="FedBE", exact=True)
    switch.click()
    assert switch.get_attribute("aria-pressed") == "false"
    assert [visited.count(f'{s}[data-method="fedbe"]') for s in (".series", ".bar", ".dot")] == [0, 0, 0]
    assert visited.count(".accuracy .series") == 1
    assert visited.count("tr.off") == 1
    visited.page.get_by_role("button", name="FedAvg", exact=True).click()
    assert visited.page.locator(".accuracy .plot").inner_text() == "All methods of this chart are hidden."
    switch.press("Enter")
    assert visited.count(".accuracy .series") == 1
    assert visited.problems == []


def test_pointer_and_keys_show_values(visit: Any, address: str) -> None:
    visited = visit(viewport={"width": 1280, "height": 4500})  # no scrolling, which hides values
    visited.page.goto(address)
    tip, chart = visited.page.locator("#tip"), visited.page.locator(".accuracy svg")
    assert tip.is_hidden()
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] * 0.86, "y": 60})
    assert tip.inner_text().split("\n")[0] == "Round 3"
    assert "72.0 % ± 2.8 (n = 2)" in tip.inner_text()
    visited.page.locator(".memory svg").first.focus()
    visited.page.keyboard.press("ArrowRight")
    assert "FedAvg, client training" in tip.inner_text()
    visited.page.keyboard.press("ArrowRight")
    assert "FedBE, client training" in tip.inner_text()
    visited.page.keyboard.press("Escape")
    assert tip.is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_theme_button(visit: Any, address: str, scheme: str) -> None:
    visited = visit(color_scheme=scheme)
    visited.page.goto(address)

    def paper() -> str:
        return str(visited.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    names = {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 27)"}
    other = {"light": "dark", "dark": "light"}[scheme]
    assert paper() == names[scheme]
    visited.page.locator("#theme").click()
    assert paper() == names[other]
    # Chromium writes what a page from a file stores after some time, so the first reload may be too early.
    for _ in range(20):
        visited.page.reload()
        if paper() == names[other]:
            break
        visited.page.wait_for_timeout(100)
    assert paper() == names[other]
    visited.page.emulate_media(media="print")
    assert paper() == names["light"]


def test_nothing_overflows_on_a_phone(visit: Any, address: str) -> None:
    visited = visit(viewport={"width": 375, "height": 700})
    visited.page.goto(address)
    assert visited.page.evaluate("document.documentElement.scrollWidth") == 375
    wide = "[...document.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().right > 376).length"
    assert visited.page.evaluate(wide) == 0
    results = visited.page.locator(".results .scroll, .results").first
    assert results.evaluate("box => box.scrollWidth <= box.clientWidth")  # differences and p need no scrolling
    visited.page.locator(".accuracy summary").click()
    assert visited.page.locator(".accuracy details td").first.is_visible()


@pytest.mark.parametrize("width", [1200, 375])
def test_a_split_of_many_classes_scrolls_in_its_panel(
    visit: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    counts = tuple(tuple(61 if i == j else 1 for j in range(120)) for i in range(100))
    monkeypatch.setattr(split_chart, "split_counts", lambda *_: (counts, tuple(map(str, range(120)))))
    folder = make_run("many", "fedavg", [0.5, 0.6, 0.7])
    visited = visit(viewport={"width": width, "height": 700})
    visited.page.goto(write_page(build_sections(read_groups([folder])), folder / "report.html").as_uri())
    assert visited.page.evaluate("document.documentElement.scrollWidth") == width
    panel = visited.page.locator(".split .panel")
    drawn = panel.locator("svg").evaluate(
        "root => Math.max(...[...root.children].map(c => c.getBBox().x + c.getBBox().width))"
    )
    assert drawn <= panel.evaluate("box => box.scrollWidth")
    assert panel.evaluate("box => getComputedStyle(box).overflowX") == "auto"
    assert visited.page.locator(".split figcaption").inner_text().count("smallest are enlarged") == 1


def test_charts_are_drawn_again_for_print_and_restored(visit: Any, address: str) -> None:
    visited = visit(viewport={"width": 1280, "height": 800})
    visited.page.goto(address)

    def width() -> float:
        return float(visited.page.evaluate("document.querySelector('.accuracy svg').viewBox.baseVal.width"))

    assert width() == 1040
    visited.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert width() == 680
    visited.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert width() == 1040


def test_names_from_files_are_harmless(visit: Any, make_run: Any, recipe: Any) -> None:
    named = recipe.model_copy(update={"name": EVIL.replace("/", ""), "summary": EVIL})
    folder = make_run("evil", "fedavg", [0.5, 0.6, 0.7], recipe=named)
    visited = visit()
    visited.page.goto(write_page(build_sections(read_groups([folder])), folder / "report.html").as_uri())
    assert visited.count("img") == 0
    assert visited.page.get_by_text(EVIL).count() > 0
    assert visited.problems == []
    assert len(visited.requests) == 1


def test_watch_updates_the_page_with_new_rounds(visit: Any, make_run: Any) -> None:
    folder = make_run("live", "fedbe", [0.5])
    server = serve(Watched(folder), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        visited = visit()
        home = f"http://127.0.0.1:{server.server_port}/"
        visited.page.goto(home)
        assert visited.page.locator("h2").inner_text() == "Unfinished: FedBE has done 1 of 3 rounds"
        visited.page.locator(".accuracy summary").click()
        with (folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(distilled(2, 0.6)) + "\n")
        visited.page.get_by_text("FedBE has done 2 of 3 rounds").first.wait_for(timeout=15_000)
        assert visited.page.locator(".accuracy .label").text_content() == "FedBE 60.0"
        assert visited.page.locator(".accuracy details").get_attribute("open") is not None  # open tables stay open
        assert visited.problems == []
        assert all(url.startswith(home) for url in visited.requests)
        folder.rename(folder.with_name("away"))  # a run that fails in its first round is removed
        visited.page.get_by_text("the run cannot be read now").wait_for(timeout=15_000)
        assert visited.page.locator(".accuracy .label").text_content() == "FedBE 60.0"
        folder.with_name("away").rename(folder)
        visited.page.get_by_text("following the run").wait_for(timeout=15_000)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    visited.page.get_by_text("fedbe watch has stopped").wait_for(timeout=15_000)

"""The page in a real Chromium: it loads in silence, draws what it should, and asks nobody for anything."""

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
    """A page that remembers what went wrong and what it asked for."""

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


def test_it_loads_in_silence_and_draws_every_series(visit: Any, address: str) -> None:
    seen = visit()
    seen.page.goto(address)
    assert seen.count(".accuracy .series") == 2
    assert seen.count(".accuracy .band") == 2
    assert seen.count(".teachers .panel") == 2
    assert seen.count(".teachers .series") == 5
    assert seen.count(".confidence .dot") == 4
    assert seen.count(".memory .bar") == 6
    assert seen.count(".split .bubble") == 40
    assert seen.count("figure svg") == seen.count("figure .panel")
    assert seen.problems == []
    assert seen.requests == [address]


def test_a_method_can_be_switched_off_and_on(visit: Any, address: str) -> None:
    seen = visit()
    seen.page.goto(address)
    switch = seen.page.get_by_role("button", name="FedBE", exact=True)
    switch.click()
    assert switch.get_attribute("aria-pressed") == "false"
    assert [seen.count(f'{s}[data-method="fedbe"]') for s in (".series", ".bar", ".dot")] == [0, 0, 0]
    assert seen.count(".accuracy .series") == 1
    assert seen.count("tr.off") == 1
    seen.page.get_by_role("button", name="FedAvg", exact=True).click()
    assert seen.page.locator(".accuracy .plot").inner_text() == "All methods of this chart are hidden."
    switch.press("Enter")
    assert seen.count(".accuracy .series") == 1
    assert seen.problems == []


def test_values_are_shown_by_pointer_and_by_keys(visit: Any, address: str) -> None:
    seen = visit(viewport={"width": 1280, "height": 4500})  # no scrolling, which hides values
    seen.page.goto(address)
    tip, chart = seen.page.locator("#tip"), seen.page.locator(".accuracy svg")
    assert tip.is_hidden()
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] * 0.86, "y": 60})
    assert tip.inner_text().split("\n")[0] == "Round 3"
    assert "72.0 % ± 2.8 (n = 2)" in tip.inner_text()
    seen.page.locator(".memory svg").first.focus()
    seen.page.keyboard.press("ArrowRight")
    assert "FedAvg, client training" in tip.inner_text()
    seen.page.keyboard.press("ArrowRight")
    assert "FedBE, client training" in tip.inner_text()
    seen.page.keyboard.press("Escape")
    assert tip.is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_system_s_colours_and_its_own_switch(visit: Any, address: str, scheme: str) -> None:
    seen = visit(color_scheme=scheme)
    seen.page.goto(address)

    def paper() -> str:
        return str(seen.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    names = {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 27)"}
    other = {"light": "dark", "dark": "light"}[scheme]
    assert paper() == names[scheme]
    seen.page.locator("#theme").click()
    assert paper() == names[other]
    seen.page.reload()
    assert paper() == names[other]
    seen.page.emulate_media(media="print")
    assert paper() == names["light"]


def test_on_a_phone_nothing_sticks_out(visit: Any, address: str) -> None:
    seen = visit(viewport={"width": 375, "height": 700})
    seen.page.goto(address)
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 375
    wide = "[...document.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().right > 376).length"
    assert seen.page.evaluate(wide) == 0
    results = seen.page.locator(".results .scroll, .results").first
    assert results.evaluate("box => box.scrollWidth <= box.clientWidth")  # differences and p are seen without scrolling
    seen.page.locator(".accuracy summary").click()
    assert seen.page.locator(".accuracy details td").first.is_visible()


@pytest.mark.parametrize("width", [1200, 375])
def test_a_split_of_many_classes_stays_in_its_place_and_can_be_reached(
    visit: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    counts = tuple(tuple(61 if i == j else 1 for j in range(120)) for i in range(100))
    monkeypatch.setattr(split_chart, "split_counts", lambda *_: (counts, tuple(map(str, range(120)))))
    folder = make_run("many", "fedavg", [0.5, 0.6, 0.7])
    seen = visit(viewport={"width": width, "height": 700})
    seen.page.goto(write_page(build_sections(read_groups([folder])), folder / "report.html").as_uri())
    assert seen.page.evaluate("document.documentElement.scrollWidth") == width
    panel = seen.page.locator(".split .panel")
    drawn = panel.locator("svg").evaluate(
        "root => Math.max(...[...root.children].map(c => c.getBBox().x + c.getBBox().width))"
    )
    assert drawn <= panel.evaluate("box => box.scrollWidth")
    assert panel.evaluate("box => getComputedStyle(box).overflowX") == "auto"
    assert seen.page.locator(".split figcaption").inner_text().count("smallest are enlarged") == 1


def test_for_paper_the_charts_are_drawn_anew_and_come_back(visit: Any, address: str) -> None:
    seen = visit(viewport={"width": 1280, "height": 800})
    seen.page.goto(address)

    def width() -> float:
        return float(seen.page.evaluate("document.querySelector('.accuracy svg').viewBox.baseVal.width"))

    assert width() == 1040
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert width() == 680
    seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert width() == 1040


def test_names_from_files_do_nothing(visit: Any, make_run: Any, recipe: Any) -> None:
    named = recipe.model_copy(update={"name": EVIL, "summary": EVIL})
    folder = make_run("evil", "fedavg", [0.5, 0.6, 0.7], recipe=named)
    seen = visit()
    seen.page.goto(write_page(build_sections(read_groups([folder])), folder / "report.html").as_uri())
    assert seen.count("img") == 0
    assert seen.page.get_by_text(EVIL).count() > 0
    assert seen.problems == []
    assert len(seen.requests) == 1


def test_watch_brings_new_rounds_into_the_page(visit: Any, make_run: Any) -> None:
    folder = make_run("live", "fedbe", [0.5])
    server = serve(Watched(folder), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        seen = visit()
        home = f"http://127.0.0.1:{server.server_port}/"
        seen.page.goto(home)
        assert seen.page.locator("h2").inner_text() == "Unfinished: FedBE has done 1 of 3 rounds"
        seen.page.locator(".accuracy summary").click()
        with (folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(distilled(2, 0.6)) + "\n")
        seen.page.get_by_text("FedBE has done 2 of 3 rounds").first.wait_for(timeout=15_000)
        assert seen.page.locator(".accuracy .label").text_content() == "FedBE 60.0"
        assert seen.page.locator(".accuracy details").get_attribute("open") is not None  # what was open stays open
        assert seen.problems == []
        assert all(url.startswith(home) for url in seen.requests)
        folder.rename(folder.with_name("away"))  # as a run that fails in its first round goes
        seen.page.get_by_text("the run cannot be read now").wait_for(timeout=15_000)
        assert seen.page.locator(".accuracy .label").text_content() == "FedBE 60.0"
        folder.with_name("away").rename(folder)
        seen.page.get_by_text("following the run").wait_for(timeout=15_000)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    seen.page.get_by_text("fedbe watch has stopped").wait_for(timeout=15_000)

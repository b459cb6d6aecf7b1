"""The page in a real browser: no errors, every figure drawn, nothing wider than a phone. Needs
playwright and a Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archsearch.records import save
from archsearch.report import write_html
from archsearch.runs.tables import CURVES_FILE
from tests.report.test_figures import BAD, some_curves
from tests.report.test_report import make_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
PATIENCE_MS = 180_000  # on a machine that does other things

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt install chromium)"),
]


# A name in a legend hides its line, with its band, and brings it back.
LEGEND = """async () => {
    const place = document.querySelector('[data-chart="by-batch"]'), key = place.nextElementSibling.querySelector('button');
    const drawn = () => place.querySelectorAll('.scatterlayer .trace').length, all = drawn(), said = [key.ariaPressed];
    for (const more of [false, true]) {
        key.click();
        await new Promise((done) => place.once('plotly_afterplot', done));
        said.push(key.ariaPressed, drawn() === all);
    }
    return said;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    with api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


SIGHTS = [
    ("unfinished", 390, "dark"),
    ("searched", 1200, "light"),
    ("confirmed", 390, "light"),
    ("confirmed", 390, "dark"),
    ("confirmed", 1200, "light"),
    ("confirmed", 1200, "dark"),
]


@pytest.mark.parametrize(("state", "width", "scheme"), SIGHTS)
def test_every_figure_is_drawn_and_nothing_is_cut(
    browser: Any, tmp_path: Path, state: str, width: int, scheme: str
) -> None:
    run = make_run(tmp_path, state, trials=40)
    if state != "unfinished":
        save(run.path / CURVES_FILE, some_curves(BAD if state == "confirmed" else "2x576"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    faults: list[str] = []
    page.on(
        "console",
        lambda message: (
            faults.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.on(
        "request",
        lambda asked: (
            None if asked.url.startswith(("file:", "data:", "blob:")) else faults.append(asked.url)
        ),
    )
    page.goto(write_html(run).as_uri(), wait_until="domcontentloaded", timeout=PATIENCE_MS)
    page.wait_for_function(
        "() => !document.querySelector('[data-chart]:not([data-drawn])')", timeout=PATIENCE_MS
    )
    assert faults == []
    empty = """() => Array.from(document.querySelectorAll('[data-chart]')).filter(
        (place) => place.querySelectorAll('svg.main-svg path').length < 2).map((place) => place.dataset.chart)"""
    assert page.evaluate(empty) == [] and (
        page.evaluate("() => document.querySelectorAll('[data-chart]').length") > 5
    ) == (state != "unfinished")
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    cut = """() => Array.from(document.querySelectorAll('main *')).filter(
        (e) => !e.closest('.scroll, pre') && e.getBoundingClientRect().right > innerWidth + 1).length"""
    assert page.evaluate(cut) == 0
    boxes = (
        "() => Array.from(document.querySelectorAll('.scroll')).every((box) => box.scrollWidth <="
        " box.clientWidth)"
    )
    assert width < 1200 or page.evaluate(boxes)  # on a desk no table needs its scroll bar
    page.evaluate(
        "() => document.querySelectorAll('pre').forEach((box) => { if (box.scrollWidth >"
        " box.clientWidth) throw box })"
    )
    if state != "unfinished":
        assert page.evaluate(LEGEND) == ["true", "false", False, "true", True]
    ink = page.evaluate("() => getComputedStyle(document.body).color")
    assert ink == {"dark": "rgb(228, 232, 238)", "light": "rgb(29, 36, 48)"}[scheme]
    context.close()

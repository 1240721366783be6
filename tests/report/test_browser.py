"""The page in a real browser: every figure is there, nothing is fetched, nothing overflows, light and dark differ."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import folders
import pytest

from adaflash.report.command import write

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str:
    """The browser's path; without one the test is skipped, but never in CI."""
    found = os.environ.get("ADAFLASH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found:
        return found
    why = "no Chromium: install one (Debian: apt-get install chromium), or name it in ADAFLASH_CHROMIUM"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        folders.whole(folder / "a-run-with-a-name-that-is-rather-long" / "x"),
        folders.whole(folder / "b" / "x", better=20),
    ]
    write(runs, folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(browser: Any, report: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    assert not said and [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    assert page.locator("figure").count() == 7
    pictures = page.get_by_role("img").and_(page.locator(".panel svg"))
    boxes = [each.bounding_box() for each in pictures.all()]
    assert len(boxes) > 15 and all(box and box["width"] > 200 and box["height"] > 50 for box in boxes)
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for summary in page.locator("details > summary").all():
        if summary.is_visible():
            summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # with every table open as well
    context.close()


def test_light_and_dark_are_two_pages(browser: Any, report: Path) -> None:
    """Ground, letters and lines of the figures follow the reader's choice; paper is always light."""
    seen = {}
    for scheme, media in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(report.as_uri())
        page.emulate_media(media=media, color_scheme=scheme)
        seen[scheme, media] = page.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor,
                      getComputedStyle(document.querySelector('.panel svg text')).fill,
                      getComputedStyle(document.querySelector('.panel svg path[style*="--s0"]')).stroke]"""
        )
        context.close()
    light, dark = seen["light", "screen"], seen["dark", "screen"]
    assert all(one != other for one, other in zip(light, dark, strict=True))
    assert seen["dark", "print"] == light

"""How long a report takes to open, and to be drawn again when its timeline is zoomed: for the benchmark of reports."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from browsing import launched, wait_until_drawn

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STEPS = 20
_FRAME = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"


def opening_s(path: Path, browser: Browser) -> float:
    """Seconds from asking a new window for the file until all of its page is drawn."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    try:
        page = context.new_page()
        page.goto(path.absolute().as_uri())
        wait_until_drawn(page)
        return float(page.evaluate("Number(document.documentElement.dataset.ready)")) / 1e3
    finally:
        context.close()


def zooming_s(path: Path, browser: Browser) -> float:
    """Seconds that a step of zoom takes until it is drawn, the mean of some; a frame of the screen is 1/60 s."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    try:
        page = context.new_page()
        page.goto(path.absolute().as_uri())
        wait_until_drawn(page)
        page.locator("canvas[data-source]").first.focus()
        begin = time.perf_counter()
        for step in range(STEPS):
            page.keyboard.press("+" if step % 4 < 2 else "-")
            page.evaluate(_FRAME)
        return (time.perf_counter() - begin) / STEPS
    finally:
        context.close()


def measured(path: Path, runs: int = 5) -> tuple[list[float], float]:
    """Of one browser: seconds to open, each time in a new window, and seconds of a step of zoom."""
    with launched() as browser:
        return [opening_s(path, browser) for _ in range(runs)], zooming_s(path, browser)

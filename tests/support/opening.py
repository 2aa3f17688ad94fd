"""How long a report takes to open: for the benchmark of reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from browsing import launched, wait_until_drawn

if TYPE_CHECKING:
    from playwright.sync_api import Browser


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


def measured(path: Path, runs: int = 5) -> list[float]:
    """Seconds to open in one browser, each time in a new window."""
    with launched() as browser:
        return [opening_s(path, browser) for _ in range(runs)]

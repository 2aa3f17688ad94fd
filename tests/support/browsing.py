"""Debian's chromium, driven by playwright, on pages written to files. Nothing is downloaded, and no network is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = Path(os.environ.get("PIPEPLAN_CHROMIUM", "/usr/bin/chromium"))
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
READY = "html[data-ready]"


def missing() -> str:
    """What there is not, in words; empty where all is there."""
    if not CHROMIUM.exists():
        return f"there is no {CHROMIUM}: install Debian's package chromium, or name another in PIPEPLAN_CHROMIUM"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install -e '.[browser]'"
    return ""


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def wait_until_drawn(page: Page) -> None:
    """Wait until the page says that it is complete, and then for the frame that a change before asked for."""
    page.wait_for_selector(READY, state="attached")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

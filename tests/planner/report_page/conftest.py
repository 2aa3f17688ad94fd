"""A browser for all tests of the page, and pages made of the example documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from browsing import launched, missing, wait_until_drawn
from reported import document_of_kind

from pipeplan.report.build import report_page as page_of


@dataclass
class Opened:
    """A page in the browser, the document that it shows, and what it did that it should not."""

    page: Any
    document: dict[str, Any]
    path: Path
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if missing():
        pytest.skip(missing())
    with launched() as found:
        yield found


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Open the page of a document, or of one of `documents.KINDS`; other arguments are the browser context's."""
    contexts = []

    def opened(kind: str | dict[str, Any], **options: Any) -> Opened:
        document = document_of_kind(kind) if isinstance(kind, str) else kind
        path = tmp_path / f"report-{len(contexts)}.html"
        path.write_text(page_of(document), encoding="utf-8")
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        contexts.append(context)
        page = context.new_page()
        found = Opened(page, document, path)
        page.on("console", lambda message: found.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            wait_until_drawn(page)
        return found

    yield opened
    for context in contexts:
        context.close()

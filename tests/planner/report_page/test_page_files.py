"""The page's files: what would let text become markup, or reach for a network, is not in them."""

from __future__ import annotations

import re

import pytest
from reported import document_of_kind

from pipeplan.report.build import report_page
from pipeplan.util import files

FILES = sorted((files.bundled_folder("templates") / "report").iterdir())
SVG = "http://www.w3.org/2000/svg"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_short_and_can_only_write_text(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 300
    assert path.suffix == ".css" or max(map(len, text.splitlines())) <= 120
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function)\b", text)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|sendBeacon|import)\b\s*\(|@import|url\(", text)
    assert re.findall(r"https?://[^\"'\s]+", text) in ([], [SVG])
    assert "</script" not in text
    assert text.startswith("/*")


def test_the_page_forbids_itself_every_network():
    text = report_page(document_of_kind("run"))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy[1].startswith(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:;"
    )
    assert re.findall(r'(?:src|href)="([^"]*)"', re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)) == [
        "data:,",
        "#content",
    ]
    assert "<noscript>" in text

"""The documents hold together, as files and as a site. `pytest -m site` builds it, with `pip install -e '.[docs]'`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from blocks import FENCE, ROOT, pages

DOCS = ROOT / "docs"
CONFIG = DOCS / "site" / "mkdocs.yml"
PAGES = [*pages(), ROOT / "CONTRIBUTING.md"]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"\b(?:planner|launch|tests|templates|profiles)/[a-z0-9_/.-]*\.[a-z0-9]+\b")
LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href|data-src)=[\"']?([^\"'\s>]+)", re.IGNORECASE
)


def _prose(page: Path) -> str:
    """A page without its blocks and without code in lines."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings, and those that are written."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for title in re.findall(r"^#{1,6} (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = 1
        unique = slug
        while unique in found:
            unique = f"{slug}-{count}"
            count += 1
        found.add(unique)
    return found


def _links(page: Path) -> Iterator[str]:
    for found in LINK.finditer(_prose(page)):
        target = found[1] or found[2]
        if not re.match(r"[a-z]+:", target):
            yield unquote(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_there_are(page: Path) -> None:
    for target in _links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert file.is_relative_to(ROOT), f"{page.name}: {target}"
        if page.is_relative_to(DOCS):
            # The site has the pages alone; GitHub has all.
            assert file.is_relative_to(DOCS), f"{page.name}: {target} is not in docs/"
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), f"{page.name}: {target}"


def test_the_code_that_a_page_names_is_there() -> None:
    for page in PAGES:
        for path in CODE.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_journeys_name_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for title, package in (
        ("From a profile to a plan", "planner/pipeplan"),
        ("From launch.sh to one training step", "launch/pipeplan_launch"),
    ):
        journey = text.partition(f"### {title}\n")[2].partition("\n### ")[0]
        names = re.findall(r"`([\w/]+(?:\.py|/))`", journey)
        assert len(names) > 15
        for name in names:
            assert (ROOT / package / name).exists() or (ROOT / name).exists(), f"{title}: {name}"


def test_the_pages_and_sections_that_the_code_names_are_there() -> None:
    for folder in ("planner", "launch", "templates", "profiles"):
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in (".py", ".j2", ".toml"):
                text = " ".join(file.read_text(encoding="utf-8").split())
                for page, sections in re.findall(r"docs/([\w/-]+\.md)((?:(?:,| and) \"[A-Z][^\"]+\")*)", text):
                    assert (DOCS / page).is_file(), f"{file.name}: {page}"
                    titles = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
                    for section in re.findall(r'"([^"]+)"', sections):
                        assert section.rstrip(".,") in titles, f"{file.name}: {page}, {section}"


def test_every_page_has_its_place_in_the_site() -> None:
    _, _, nav = CONFIG.read_text(encoding="utf-8").partition("\nnav:\n")
    listed = re.findall(r"- (?:[^:\n]+: )?([\w/.-]+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(set(listed))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    evidence = {page for page in pages if page.startswith("evidence/")}
    assert set(listed) == pages - evidence
    entry = (DOCS / "evidence" / "index.md").read_text(encoding="utf-8")
    assert all(f"]({Path(page).name})" in entry for page in evidence - {"evidence/index.md"})


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in DOCS.rglob("*.md")
        for target in _links(page)
        if not target.startswith("#")
    }
    assert set(DOCS.rglob("*.md")) - linked <= {DOCS / "index.md"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning is an error."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # Whoever asks the network while building gets no answer.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(folder)],
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.site
def test_the_site_has_every_page_and_fetches_nothing(site: Path) -> None:
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert built >= {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")}
    for path in site.rglob("*.html"):
        for target in LOADED.findall(path.read_text(encoding="utf-8")):
            assert not re.match(r"(?:https?:)?//", target) or "rel=canonical" in target, f"{path.name} loads {target}"
    for path in site.rglob("*.css"):
        loaded = re.findall(r"url\([\"']?((?:https?:)?//[^)\"']+)", path.read_text(encoding="utf-8"))
        assert not loaded, f"{path.name} loads {loaded}"


@pytest.mark.site
def test_the_site_can_be_searched_from_a_disk(site: Path) -> None:
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("var __index = "))
    assert any("Weight versions" in document["title"] for document in index["docs"])

"""Reports can be read with a screen reader, by keys alone, in light and dark, on paper and without motion."""

from __future__ import annotations

import itertools

import pytest
from reported import KINDS

from pipeplan.util.units import show_time

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def axe():
    module = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    return module.Axe()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "big"])
def test_axe_finds_nothing(show, axe, kind, scheme):
    page = show(kind, color_scheme=scheme).page
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.wait_for_function("document.querySelectorAll('table').length > 5")
    found = axe.run(page).response
    assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]] == []


def test_axe_finds_nothing_in_a_large_report(show, axe):
    found = axe.run(show("big").page).response
    assert [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in found["violations"]] == []


@pytest.mark.parametrize("kind", ["plan", "run"])
def test_landmarks_and_headings_are_in_order(show, kind):
    page = show(kind).page
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert page.get_by_role(landmark).count() == 1
    levels = page.locator("h1, h2, h3").evaluate_all("found => found.map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_every_drawing_has_a_name_and_a_table(show):
    page = show("run").page
    drawings = page.locator("[role=img]")
    assert drawings.count() > 8
    names = drawings.evaluate_all(
        "found => found.map(one => one.getAttribute('aria-label') || one.querySelector('title')?.textContent || '')"
    )
    assert all(len(name) > 10 for name in names)
    for part in ("placement", "model", "timeline", "memory", "loads", "comparisons"):
        page.locator(f"#{part} summary", has_text="As a table").or_(
            page.locator(f"#{part} summary", has_text="as a table")
        ).first.click()
        page.locator(f"#{part} details[open] tbody tr").first.wait_for()  # a table is made when it is first opened
        assert page.locator(f"#{part} details[open] table caption").first.inner_text()


def test_all_can_be_reached_by_keys(show):
    page = show("run").page
    reached = []
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "() => { const one = document.activeElement;"
                " return one.getAttribute('class') || one.textContent.slice(0, 30) }"
            )
        )
    for name in ("skip", "Dark theme", "graph-box", "timeline", "As a table"):
        assert any(name.split()[0] in str(one) for one in reached), (name, reached)


def test_a_layer_has_its_figures_in_its_title(show):
    opened = show("plan")
    nodes = opened.document["graph"]["nodes"]
    facts = opened.page.locator(".card title").nth(2).text_content()
    assert facts.startswith(f"{nodes['name'][2]}\n")
    assert f"forward {show_time(nodes['forward_s'][2])}," in facts


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_chosen(show, scheme):
    other = {"light": "dark", "dark": "light"}[scheme]
    page = show("plan", color_scheme=scheme).page
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.locator("html").get_attribute("data-theme") == scheme
    before = page.evaluate(background)
    page.locator("#theme").click()
    assert page.locator("html").get_attribute("data-theme") == other
    assert page.evaluate(background) != before
    page.emulate_media(color_scheme=other)
    page.emulate_media(color_scheme=scheme)
    assert page.locator("html").get_attribute("data-theme") == other


def test_paper_is_light_and_has_nothing_to_press(show):
    page = show("plan", color_scheme="dark").page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("html").get_attribute("data-theme") == "light"
    assert not page.get_by_role("navigation").is_visible()
    assert not page.locator("#theme").is_visible()
    assert page.locator("#timeline svg[data-source]").is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("html").get_attribute("data-theme") == "dark"


def test_nothing_moves_for_those_who_do_not_want_it(show):
    behaviour = "getComputedStyle(document.documentElement).scrollBehavior"
    assert show("plan", reduced_motion="reduce").page.evaluate(behaviour) == "auto"
    assert show("plan", reduced_motion="no-preference").page.evaluate(behaviour) == "smooth"

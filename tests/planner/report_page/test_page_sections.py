"""Every kind of report opens without a complaint or a request, has its sections, and fits a narrow screen."""

from __future__ import annotations

import pytest
from reported import KINDS, document_of_kind

from pipeplan.util.units import show_size, show_time

pytestmark = pytest.mark.browser

SECTIONS = ["placement", "model", "timeline", "memory", "comparisons", "loads", "certificate"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_is_complete_and_fetches_nothing(show, kind):
    opened = show(kind)
    page = opened.page
    assert opened.complaints == []
    assert opened.requests == [opened.path.as_uri()]
    assert page.locator("main section").evaluate_all("found => found.map(one => one.id)") == SECTIONS
    assert page.locator("h1").inner_text() == opened.document["title"]
    assert page.title() == f"{opened.document['title']}: pipeplan report"
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("#run").count() == (opened.document["measured"] is not None)
    assert page.locator("svg.graph").count() == 1
    assert page.locator("svg[data-source]").count() == 1 + (opened.document["timeline"]["measured"] is not None)


@pytest.mark.parametrize("width", [320, 360])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_wider_than_a_phone(show, kind, width):
    page = show(kind, viewport={"width": width, "height": 740}).page
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.wait_for_function("document.querySelectorAll('details > :not(summary)').length > 5")
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_parts_that_are_missing_are_left_out(show):
    document = document_of_kind("plan")
    document |= {"loads": [], "memory": [], "comparisons": [], "notes": [], "words": {}}
    document["timeline"]["steady"] = None
    opened = show(document)
    assert opened.complaints == []
    found = opened.page.locator("main section").evaluate_all("found => found.map(one => one.id)")
    assert found == ["placement", "model", "timeline", "certificate"]


def test_what_a_run_changed_is_said_in_words_and_figures(show):
    opened = show("run")
    box = opened.page.locator("#run")
    assert "25% longer than predicted" in box.inner_text()
    assert "First cause of the difference: stage 0 computes for longer" in box.inner_text()
    box.locator("summary").click()
    row = box.locator("tbody tr").first.inner_text()
    first = opened.document["measured"]["stages"][0]
    for name, show_figure in (("forward_s", show_time), ("memory_bytes", show_size)):
        assert f"{show_figure(first[name]['predicted'])} → {show_figure(first[name]['measured'])}" in row


def test_the_headline_has_the_plan_its_gain_and_its_proof(show):
    document = document_of_kind("plan")
    document["certificate"] |= {"proven": True, "gap": 0}
    document["made"]["learning"] = ""
    made, gain = document["made"], next(one["gain"] for one in document["comparisons"] if one["config"] == "16")
    manner = f"{made['schedule']}: {made['manner']}"
    text = show(document).page.locator(".tiles").inner_text()
    for figure in (made["config"], manner, show_time(document["prediction"]["minibatch_s"]), f"{gain:.2f}×", "Proven"):
        assert figure in text


def test_a_plan_that_may_not_learn_is_not_called_proven(show):
    document = document_of_kind("plan")
    document["made"]["learning"] = "NOT SAFE: SGD with momentum missed the goal in 5 of 5 runs of the nearest test."
    page = show(document).page
    tiles = page.locator(".tiles").inner_text()
    assert "Not safe" in tiles
    assert "Proven" not in tiles
    assert "missed the goal" in page.locator(".note.warning").inner_text()


@pytest.mark.parametrize(("gap", "shown"), [(0.145424, "≤ 14.5%"), (0.000284, "≤ 0.03%")])
def test_a_gap_has_the_digits_that_the_screen_gives_it(show, gap, shown):
    document = document_of_kind("plan")
    document["certificate"] |= {"proven": False, "gap": gap}
    document["made"]["learning"] = ""
    assert shown in show(document).page.locator(".tiles").inner_text()


@pytest.mark.parametrize(
    ("own", "rivals", "expected"),
    [
        ("", [("DDP", 1.5), ("HSDP", 1.2)], ("Over DDP", "1.50×")),
        ("ddp", [("HSDP", 1.2), ("one server", 1.1)], ("Over one server", "1.10×")),
        ("hsdp", [("FSDP", 1.02)], ("Over FSDP", "DDP does not fit")),
    ],
)
def test_the_headline_compares_with_ddp_or_with_the_best_other_plan(show, own, rivals, expected):
    document = document_of_kind("plan")
    step = document["prediction"]["minibatch_s"]
    document["made"]["data_parallel"] = own
    document["comparisons"][1:] = [
        {"name": name, "config": "", "minibatch_s": gain * step, "gain": gain, "remark": "16 workers, microbatch 64"}
        for name, gain in rivals
    ]
    text = show(document).page.locator(".tiles").inner_text()
    for words in expected:
        assert words in text


def test_text_from_files_never_becomes_markup(show):
    opened = show("hostile")
    page = opened.page
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.wait_for_function("document.querySelectorAll('table').length > 8")
    assert page.evaluate("window.hit") is None
    assert page.locator("main img, main script").count() == 0
    assert '<img src=x onerror="window.hit=1"></script>' in page.locator("h1").inner_text()
    assert "{{7*7}}" in page.locator(".card title").first.text_content()
    assert opened.complaints == []
    assert opened.requests == [opened.path.as_uri()]


def test_without_javascript_the_page_says_what_is_missing(show):
    opened = show("plan", java_script_enabled=False)
    text = opened.page.locator("body").inner_text()
    assert opened.document["title"] in text
    assert "JavaScript" in text


def test_sizes_are_far_below_what_is_promised(show):
    assert show("plan").path.stat().st_size < 300_000
    assert show("big").path.stat().st_size < 5_000_000

"""Reports open without a complaint or a request, fit a phone, and can be read by keys, on paper and without colour."""

from __future__ import annotations

import itertools

import pytest
from reported import KINDS, document_of_kind

from pipeplan.util.units import show_size, show_time

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def axe():
    module = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    return module.Axe()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", KINDS)
def test_axe_finds_nothing(show, axe, kind, scheme):
    page = show(kind, color_scheme=scheme).page
    if kind != "big":
        page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        page.wait_for_function("document.querySelectorAll('table').length > 5")
    found = axe.run(page).response
    assert [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in found["violations"]] == []


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


def test_landmarks_and_headings_are_in_order_and_drawings_have_a_name_and_a_table(show):
    page = show("run").page
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert page.get_by_role(landmark).count() == 1
    levels = page.locator("h1, h2, h3").evaluate_all("found => found.map(one => Number(one.tagName[1]))")
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    names = page.locator("[role=img]").evaluate_all(
        "found => found.map(one => one.getAttribute('aria-label') || one.querySelector('title')?.textContent || '')"
    )
    assert len(names) > 8
    assert all(len(name) > 10 for name in names)
    for part in ("placement", "model", "timeline", "memory", "loads", "comparisons"):
        page.locator(f"#{part} summary", has_text="As a table").or_(
            page.locator(f"#{part} summary", has_text="as a table")
        ).first.click()
        page.locator(f"#{part} details[open] tbody tr").first.wait_for()  # a table is made when it is first opened
        assert page.locator(f"#{part} details[open] table caption").first.inner_text()


def test_all_can_be_reached_by_keys_and_a_layer_has_its_figures_in_its_title(show):
    opened = show("run")
    page, nodes, reached = opened.page, opened.document["graph"]["nodes"], []
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
    facts = page.locator(".card title").nth(2).text_content()
    assert facts.startswith(f"{nodes['name'][2]}\n")
    assert f"forward {show_time(nodes['forward_s'][2])}," in facts


SECTIONS = ["placement", "model", "timeline", "memory", "comparisons", "loads", "certificate"]


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_is_complete_fetches_nothing_and_is_no_wider_than_a_phone(show, kind):
    opened = show(kind, viewport={"width": 320, "height": 740})
    page = opened.page
    assert (opened.complaints, opened.requests) == ([], [opened.path.as_uri()])
    assert page.locator("main section").evaluate_all("found => found.map(one => one.id)") == SECTIONS
    assert page.locator("h1").inner_text() == opened.document["title"]
    assert page.title() == f"{opened.document['title']}: pipeplan report"
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("#run").count() == (opened.document["measured"] is not None)
    assert page.locator("svg.graph").count() == 1
    assert page.locator("svg[data-source]").count() == 1 + (opened.document["timeline"]["measured"] is not None)
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.wait_for_function("document.querySelectorAll('details > :not(summary)').length > 5")
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    assert opened.path.stat().st_size < (5_000_000 if kind == "big" else 300_000)


def _tiles(show, **certificate):
    """The headline of a plan of data parallelism's rival with this certificate, and its document."""
    document = document_of_kind("plan")
    document["certificate"] |= certificate
    document["made"]["learning"] = ""
    return show(document).page.locator(".tiles").inner_text(), document


def test_the_headline_has_the_plan_its_gain_and_its_proof(show):
    text, document = _tiles(show, proven=True, gap=0)
    made, gain = document["made"], next(one["gain"] for one in document["comparisons"] if one["config"] == "16")
    manner = f"{made['schedule']}: {made['manner']}"
    for figure in (made["config"], manner, show_time(document["prediction"]["minibatch_s"]), f"{gain:.2f}×", "Proven"):
        assert figure in text
    for gap, shown in ((0.145424, "≤ 14.5%"), (0.000284, "≤ 0.03%")):
        assert shown in _tiles(show, proven=False, gap=gap)[0]
    document["made"]["learning"] = "NOT SAFE: SGD with momentum missed the goal in 5 of 5 runs of the nearest test."
    page = show(document).page
    tiles = page.locator(".tiles").inner_text()
    assert ("Not safe" in tiles, "Proven" in tiles) == (True, False)
    assert "missed the goal" in page.locator(".note.warning").inner_text()


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


@pytest.fixture
def run(show):
    return show("run")


def whole(opened):
    facts = opened.document["timeline"]
    return max(facts["end_s"], facts["measured_end_s"])


def places(page, source, kind):
    """Left edge and width of every interval of a kind, in pixels."""
    return page.locator(f"svg[data-source={source}] .lane rect.{kind}").evaluate_all(
        "found => found.map(one => [Number(one.getAttribute('x')), Number(one.getAttribute('width'))])"
    )


def widths(page):
    return page.locator("svg[data-source]").evaluate_all("found => found.map(one => one.clientWidth)")


def test_intervals_lie_where_their_times_are(run):
    page, scale = run.page, (widths(run.page)[0] - 2) / whole(run)
    for source, (number, kind) in itertools.product(("predicted", "measured"), enumerate(("forward", "backward"))):
        columns = run.document["timeline"][source]
        spans = [
            (round(start * scale, 1), (end - start) * scale)
            for one, start, end in zip(columns["kind"], columns["start_s"], columns["end_s"], strict=True)
            if one == number
        ]
        assert len(spans) > 20
        assert sorted(places(page, source, kind)) == [pytest.approx(span, abs=0.11) for span in sorted(spans)]


def test_an_interval_has_its_figures_in_its_title(run):
    title = run.page.locator("svg[data-source=predicted] .lane title").first.text_content()
    assert title.startswith("forward of microbatch 0\nworker 0, stage 1, predicted\n")
    ends = show_time(run.document["timeline"]["predicted"]["end_s"][0])
    assert f"{ends}, from 0 to {ends}" in title


def test_the_table_has_the_seconds_of_every_worker(run):
    page = run.page
    facts = run.document["timeline"]
    from_s, to_s = facts["steady"]
    columns = facts["predicted"]
    seconds = [0.0] * len(facts["lanes"]["worker"])
    for lane, kind, start, end in zip(*(columns[key] for key in ("lane", "kind", "start_s", "end_s")), strict=True):
        seconds[lane] += kind < 4 and max(0.0, min(end, to_s) - max(start, from_s))
    page.locator("#timeline summary", has_text="every worker").first.click()
    page.locator("#timeline tbody tr").first.wait_for()  # a table is made when it is first opened
    cells = page.locator("#timeline tbody tr td:last-child").all_inner_texts()
    assert cells == [f"{round(100 * one / (to_s - from_s))}%" for one in seconds]


def test_kinds_differ_without_colour(run):
    """A backward pass that is wide enough has stripes, and a forward pass is plain."""
    page = run.page
    wide = sum(width > 3 for source in ("predicted", "measured") for _, width in places(page, source, "backward"))
    assert page.locator("rect.backward + path.hatch").count() == wide + 1, "one is in the legend"
    assert page.locator("rect.forward + path.hatch").count() == 0


def test_both_panels_zoom_together_and_scroll_to_the_steady_state(run):
    page = run.page
    before = widths(page)
    assert before[0] == before[1]
    page.get_by_role("button", name="Zoom in", exact=True).click()
    assert widths(page) == [pytest.approx(1.5 * one, rel=0.01) for one in before]
    page.get_by_role("button", name="Show the steady state").click()
    scrolled = page.locator(".timeline").evaluate("one => one.scrollLeft")
    assert scrolled == pytest.approx(run.document["timeline"]["steady"][0] / whole(run) * (widths(page)[0] - 2), abs=2)
    page.get_by_role("button", name="Zoom out", exact=True).click()
    assert widths(page) == [pytest.approx(one, abs=2) for one in before]
    page.get_by_role("button", name="Show everything").click()
    assert widths(page)[0] <= page.locator(".timeline").evaluate("one => one.clientWidth")

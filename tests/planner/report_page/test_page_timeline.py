"""The timeline shows predicted and measured intervals on one scale, zooms and scrolls, and has its figures in words."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.browser


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


@pytest.mark.parametrize("source", ["predicted", "measured"])
def test_intervals_lie_where_their_times_are(run, source):
    page, columns = run.page, run.document["timeline"][source]
    scale = (widths(page)[0] - 2) / whole(run)
    for number, kind in ((0, "forward"), (1, "backward")):
        spans = [
            (start * scale, (end - start) * scale)
            for one, start, end in zip(columns["kind"], columns["start_s"], columns["end_s"], strict=True)
            if one == number
        ]
        assert len(spans) > 15
        drawn = places(page, source, kind)
        assert sorted(drawn) == [pytest.approx(span, abs=0.11) for span in sorted(spans)]


def test_both_panels_zoom_together(run):
    page = run.page
    before = widths(page)
    assert before[0] == before[1]
    page.get_by_role("button", name="Zoom in", exact=True).click()
    assert widths(page) == [pytest.approx(1.5 * one, rel=0.01) for one in before]
    page.get_by_role("button", name="Zoom out", exact=True).click()
    assert widths(page) == [pytest.approx(one, abs=2) for one in before]
    page.get_by_role("button", name="Show everything").click()
    assert widths(page)[0] <= page.locator(".timeline").evaluate("one => one.clientWidth")


def test_passes_have_room_for_their_numbers_and_the_drawing_fills_the_page(run):
    page = run.page
    box = page.locator(".timeline").evaluate("one => one.clientWidth")
    assert widths(page)[0] >= box - 140, "beside the labels"
    drawn = [width for _, width in places(page, "predicted", "forward")]
    long = [width for width in drawn if width >= sum(drawn) / len(drawn)]
    assert len(long) > 10
    assert min(long) >= 32
    assert page.locator("svg[data-source=predicted] text.on-plain").count() >= len(long)


def test_the_steady_state_is_scrolled_to(run):
    page = run.page
    for _ in range(3):  # until what is after its begin is wider than the page
        page.get_by_role("button", name="Zoom in", exact=True).click()
    page.get_by_role("button", name="Show the steady state").click()
    scrolled = page.locator(".timeline").evaluate("one => one.scrollLeft")
    assert scrolled == pytest.approx(run.document["timeline"]["steady"][0] / whole(run) * (widths(page)[0] - 2), abs=2)


def test_an_interval_has_its_figures_in_its_title(run):
    title = run.page.locator("svg[data-source=predicted] .lane title").first.text_content()
    assert title.startswith("forward of microbatch 0\nworker 0, stage 1, predicted\n")
    assert "3 ms, from 0 to 3 ms" in title


def test_the_table_has_the_seconds_of_every_worker(run):
    page = run.page
    facts = run.document["timeline"]
    from_s, to_s = facts["steady"]
    columns = facts["predicted"]
    seconds = [0.0] * 4
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

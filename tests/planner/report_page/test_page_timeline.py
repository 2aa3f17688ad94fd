"""The timeline zooms by wheel, drag, keys and buttons, predicted and measured together, and says what it shows."""

from __future__ import annotations

import pytest
from browsing import wait_until_drawn

pytestmark = pytest.mark.browser


def windows(page):
    """The window of time of each panel."""
    wait_until_drawn(page)
    return page.locator("canvas[data-source]").evaluate_all(
        "found => found.map(one => [Number(one.dataset.from), Number(one.dataset.to)])"
    )


def gutter(page):
    return page.locator(".strip").evaluate("one => parseFloat(one.style.marginLeft)")


@pytest.fixture
def run(show):
    return show("run")


def whole(opened):
    facts = opened.document["timeline"]
    return [0, max(facts["end_s"], facts["measured_end_s"])]


def test_it_begins_with_everything(run):
    assert windows(run.page) == [whole(run)] * 2


@pytest.mark.parametrize("panel", [0, 1], ids=["predicted", "measured"])
def test_keys_zoom_and_move_both_panels(run, panel):
    page = run.page
    page.locator("canvas[data-source]").nth(panel).focus()
    page.keyboard.press("+")
    (from_s, to_s), other = windows(page)
    assert other == [from_s, to_s]
    assert to_s - from_s == pytest.approx(0.7 * whole(run)[1])
    page.keyboard.press("ArrowRight")
    moved, other = windows(page)
    assert other == moved
    assert moved[0] - from_s == pytest.approx((to_s - from_s) / 8)
    page.keyboard.press("End")
    assert windows(page)[0][1] == pytest.approx(whole(run)[1])
    page.keyboard.press("Home")
    assert windows(page)[0][0] == 0
    page.keyboard.press("0")
    assert windows(page) == [whole(run)] * 2
    page.keyboard.press("-")
    assert windows(page) == [whole(run)] * 2


def test_the_wheel_zooms_where_the_pointer_is_once_the_panel_has_the_focus(run):
    page = run.page
    canvas = page.locator("canvas[data-source]").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    left = gutter(page)
    share = 0.25
    page.mouse.move(box["x"] + left + share * (box["width"] - left), box["y"] + 20)
    page.mouse.wheel(0, -100)
    assert windows(page)[0] == whole(run)
    canvas.focus()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + left + share * (box["width"] - left), box["y"] + 20)
    page.mouse.wheel(0, -200)
    page.wait_for_function(f"document.querySelector('canvas[data-source]').dataset.to < {0.99 * whole(run)[1]}")
    (from_s, to_s), other = windows(page)
    assert other == [from_s, to_s]
    assert from_s + share * (to_s - from_s) == pytest.approx(share * whole(run)[1], rel=0.02)


def test_dragging_moves_by_as_much_time_as_the_pointer_passes(run):
    page = run.page
    page.get_by_role("button", name="Zoom in", exact=True).first.click()
    page.get_by_role("button", name="Show the steady state").click()
    before = windows(page)[0]
    canvas = page.locator("canvas[data-source]").nth(1)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 600, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 20, steps=4)
    page.mouse.up()
    after, *_ = windows(page)
    width = box["width"] - gutter(page)
    assert after[0] - before[0] == pytest.approx(100 / width * (before[1] - before[0]), rel=1e-6)
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])


def test_the_strip_above_chooses_a_window(run):
    page = run.page
    strip = page.locator(".strip")
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 10, steps=3)
    page.mouse.up()
    end = whole(run)[1]
    assert windows(page)[1] == [pytest.approx(0.5 * end, rel=0.01), pytest.approx(0.75 * end, rel=0.01)]


def test_it_never_leaves_the_run_nor_zooms_beyond_sense(run):
    page = run.page
    page.locator("canvas[data-source]").first.focus()
    for _ in range(60):
        page.keyboard.press("+")
    from_s, to_s = windows(page)[0]
    assert 0 < to_s - from_s < whole(run)[1] / 100
    for end, towards, side in (("Home", "ArrowLeft", 0), ("End", "ArrowRight", 1)):
        page.keyboard.press(end)
        page.keyboard.press(towards)
        assert windows(page)[0][side] == pytest.approx(whole(run)[side])


def test_stepping_through_a_worker_says_what_it_does(run):
    page = run.page
    page.locator("canvas[data-source]").first.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    status = page.locator("#timeline .status")
    assert "worker 0, stage 1, predicted" in status.inner_text()
    for _ in range(100):
        page.keyboard.press(",")
    assert status.inner_text().startswith("forward of minibatch 0, worker 0")
    assert "13.2 ms, from 0 to 13.2 ms" in status.inner_text()


def test_pointing_at_a_pass_shows_its_figures(run):
    page = run.page
    canvas = page.locator("canvas[data-source]").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + gutter(page) + 4, box["y"] + 8)
    assert "forward of minibatch 0" in page.locator(".tooltip").inner_text()


def test_a_panel_of_many_workers_scrolls_with_the_keys(show):
    page = show("big").page
    page.locator("canvas[data-source]").first.focus()
    for _ in range(60):
        page.keyboard.press("ArrowDown")
    assert page.locator(".lanes").first.evaluate("one => one.scrollTop") > 0
    assert "worker 59" in page.locator("#timeline .status").inner_text()


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


def test_the_canvas_is_not_blank_and_kinds_differ_without_colour(run):
    """In shades of grey a backward pass is not as even as a forward one, and a wait is nearly empty."""
    page = run.page
    script = """() => {
      const canvas = document.querySelector('canvas[data-source=predicted]');
      const left = parseFloat(document.querySelector('.strip').style.marginLeft);
      const scale = canvas.width / parseFloat(canvas.style.width);
      const end = Number(canvas.dataset.to);
      const at = (time) => (left + (time / end) * (parseFloat(canvas.style.width) - left)) * scale;
      const shades = (from, to, lane) => {
        // Two rows between the border of the interval and the letters on it.
        const [x, y] = [Math.round(at(from)) + 3, Math.round((lane * 24 + 3) * scale)];
        const image = canvas.getContext('2d').getImageData(x, y, Math.max(2, Math.round(at(to)) - x - 3), 2).data;
        const found = new Set();
        for (let i = 0; i < image.length; i += 4) found.add(Math.round((image[i] + image[i + 1] + image[i + 2]) / 24));
        return found.size;
      };
      const facts = JSON.parse(document.getElementById('document').textContent).timeline.predicted;
      const long = (at) => facts.end_s[at] - facts.start_s[at] > 0.01;
      const first = (kind) => facts.kind.findIndex((one, at) => one === kind && long(at));
      return [0, 1].map(first).map((at) => shades(facts.start_s[at], facts.end_s[at], facts.lane[at]));
    }"""
    forward, backward = page.evaluate(script)
    assert forward == 1
    assert backward > 3

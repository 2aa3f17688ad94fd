"""A minibatch that is chosen on the timeline stands out, the first one, whose number is 0, like any other."""

from __future__ import annotations

import pytest
from browsing import wait_until_drawn

pytestmark = pytest.mark.browser

# By panel, number and opacity (0 to 255) of each pass that is wide enough to look at, with its middle on the page.
PASSES = """() => [...document.querySelectorAll('canvas[data-source]')].map((canvas) => {
  const facts = JSON.parse(document.getElementById('document').textContent).timeline[canvas.dataset.source];
  const left = parseFloat(document.querySelector('.strip').style.marginLeft);
  const box = canvas.getBoundingClientRect();
  const scale = canvas.width / box.width;
  const wide = (time) => (time / Number(canvas.dataset.to)) * (box.width - left);
  return facts.number.flatMap((number, at) => {
    const [start, end] = [facts.start_s[at], facts.end_s[at]];
    if (facts.kind[at] > 1 || wide(end - start) < 6) return [];
    const [x, y] = [left + wide((start + end) / 2), 24 * facts.lane[at] + 5];
    const [, , , opacity] = canvas.getContext('2d').getImageData(x * scale, y * scale, 1, 1).data;
    return [{ number, opacity, x: box.left + x, y: box.top + y }];
  });
})"""


def passes(page):
    wait_until_drawn(page)
    predicted, measured = page.evaluate(PASSES)
    assert min(len(predicted), len(measured)) > 100
    return predicted, measured


def standing_out(page):
    """The minibatches whose passes are opaque; those of all others must be faint, in both panels."""
    for panel in (found := passes(page)):
        assert all(one["opacity"] == 255 or 50 < one["opacity"] < 100 for one in panel)
    opaque, other = ({one["number"] for one in panel if one["opacity"] == 255} for panel in found)
    faint = {one["number"] for panel in found for one in panel if one["opacity"] < 255}
    assert opaque == other
    assert not opaque & faint
    return opaque


def click(page, number):
    page.locator("canvas[data-source]").first.scroll_into_view_if_needed()
    first = next(one for one in passes(page)[0] if one["number"] == number)
    page.mouse.click(first["x"], first["y"])


def step_to(page, number):
    """By keys, from the first worker's first pass on."""
    page.locator("canvas[data-source]").first.focus()
    page.keyboard.press("ArrowDown")
    for _ in range(100):
        page.keyboard.press(",")
    status = page.locator("#timeline .status")
    for _ in range(20):
        if f" of minibatch {number}," in status.inner_text():
            return
        page.keyboard.press(".")
    raise AssertionError(f"minibatch {number} is not found: {status.inner_text()}")


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("choose", [click, step_to], ids=["click", "keys"])
def test_all_minibatches_but_the_chosen_one_fade(show, choose, number):
    page = show("run").page
    everything = set(range(24))
    assert standing_out(page) == everything, "none is chosen"
    choose(page, number)
    assert standing_out(page) == {number}
    page.locator("canvas[data-source]").first.focus()
    page.keyboard.press("Escape")
    assert standing_out(page) == everything


def test_a_second_click_on_the_first_minibatch_lets_go(show):
    page = show("run").page
    click(page, 0)
    assert standing_out(page) == {0}
    click(page, 0)
    assert len(standing_out(page)) == 24

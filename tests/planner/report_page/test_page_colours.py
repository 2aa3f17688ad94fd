"""Colours have the contrast that WCAG 2 asks for, and neighbouring stages differ for every kind of sight.

Contrast and colour blindness are computed here from their sources; the page's own functions are only asked for colours.
"""

from __future__ import annotations

import itertools
import math
import re

import pytest

from pipeplan.util import files

pytestmark = pytest.mark.browser
FOLDER = files.bundled_folder("templates") / "report"
SIGHTS = {
    "typical": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    # Machado, Oliveira and Fernandes, A physiologically-based model for simulation of color vision deficiency (2009),
    # severity 1, of linear RGB.
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
APART = 0.06
"""In OKLab, where 0.02 is about what can just be told apart."""


def linear(colour):
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def contrast(one, other):
    def luminance(colour):
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def oklab(colour, sight):
    """Ottosson, A perceptual color space for image processing (2020), of the colour as that sight has it."""
    seen = [max(0.0, sum(a * b for a, b in zip(row, linear(colour), strict=True))) for row in SIGHTS[sight]]
    cones = (
        (0.4122214708, 0.5363325363, 0.0514459929),
        (0.2119034982, 0.6806995451, 0.1073969566),
        (0.0883024619, 0.2817188376, 0.6299787005),
    )
    roots = [math.cbrt(sum(a * b for a, b in zip(row, seen, strict=True))) for row in cones]
    axes = (
        (0.2104542553, 0.7936177850, -0.0040720468),
        (1.9779984951, -2.4285922050, 0.4505937099),
        (0.0259040371, 0.7827717662, -0.8086757660),
    )
    return [sum(a * b for a, b in zip(row, roots, strict=True)) for row in axes]


def tokens(scheme):
    text = (FOLDER / "base.css").read_text(encoding="utf-8")
    block = re.search(r":root \{(.*?)\}" if scheme == "light" else r'\[data-theme="dark"\] \{(.*?)\}', text, re.DOTALL)
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block[1]))


@pytest.fixture(params=["light", "dark"])
def scheme(request):
    return request.param


@pytest.fixture
def stages(browser, scheme):
    """The colours of each stage: its own, the ground of backward passes, its edge, and the ink on the first two."""
    page = browser.new_page()
    source = (FOLDER / "colours.js").read_text(encoding="utf-8")
    found = page.evaluate(
        f"""() => {{ {source}
        return STAGES.map((_, at) => stageColours(at, "{scheme}"));
        }}"""
    )
    page.close()
    assert len(found) == 12
    return found


def test_stages_can_be_read_and_stand_out_from_the_page_and_from_each_other(stages, scheme):
    for stage in stages:
        assert contrast(stage["stage"], stage["ink"]) >= 4.5
        assert contrast(stage["deep"], stage["deep-ink"]) >= 4.5
        assert contrast(stage["edge"], tokens(scheme)["surface"]) >= 3
    for sight in SIGHTS:
        seen = [oklab(stage["stage"], sight) for stage in stages]
        assert min(math.dist(one, other) for one, other in zip(seen, [*seen[1:], seen[0]], strict=True)) >= APART
        assert min(math.dist(one, other) for one, other in itertools.combinations(seen[:6], 2)) >= APART


def test_text_and_bars_have_contrast(scheme):
    found = tokens(scheme)
    least = {("ink", "steady"): 4.5}
    least |= dict.fromkeys(itertools.product(("ink", "muted", "accent"), ("ground", "surface")), 4.5)
    least |= dict.fromkeys(itertools.product(("bar", "full", "measured", "ink"), ("sunken",)), 3)
    least |= dict.fromkeys(itertools.product(("strong-line", "bar", "full", "measured"), ("surface",)), 3)
    for (one, other), ratio in least.items():
        assert contrast(found[one], found[other]) >= ratio, (one, other)

"""Reports as the command writes them, from planning to the page: nothing that the planner says breaks it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from browsing import wait_until_drawn

pytestmark = pytest.mark.browser

PLANS = {
    "vgg16-2x8": ("vgg16-v100", "--cluster", "B"),
    "branches": ("gnmt16-v100", "--cluster", "A", "--solver", "dp"),
    "inference": ("vgg16-v100", "--cluster", "A", "--inference"),
    "flush": ("vgg16-v100", "--cluster", "A", "--schedule", "gpipe", "--batch", "2048", "--solver", "dp"),
}


@pytest.mark.parametrize("plan", list(PLANS))
def test_what_the_command_writes_opens_without_a_complaint(browser, tmp_path, plan):
    for command in (("solve", *PLANS[plan], "-o", "plan"), ("report", "plan", "-o", "report.html")):
        subprocess.run([sys.executable, "-m", "pipeplan", *command], cwd=tmp_path, check=True, capture_output=True)
    path = tmp_path / "report.html"
    assert path.stat().st_size < 1_000_000
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    wait_until_drawn(page)
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.wait_for_function("document.querySelectorAll('table').length > 5")
    text = page.locator("main").inner_text()
    page.close()
    assert complaints == []
    assert requests == [path.as_uri()]
    assert not re.search(r"\b(undefined|NaN|null|Infinity)\b|\[object", text)
    titles = "Why: what limits the step time", "Also: other plans", "Trust: what is proven"
    for heading in ("Placement", "Model", "Timeline", "Memory", *titles):
        assert f"\n{heading}\n" in text

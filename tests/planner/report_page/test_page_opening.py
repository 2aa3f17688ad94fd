"""The functions that the benchmark of reports measures with."""

from __future__ import annotations

import pytest
from opening import opening_s, zooming_s

pytestmark = pytest.mark.browser


def test_a_report_opens_and_zooms_in_some_time(browser, show):
    path = show("plan").path
    assert 0 < opening_s(path, browser) < 60
    assert 0 < zooming_s(path, browser) < 60

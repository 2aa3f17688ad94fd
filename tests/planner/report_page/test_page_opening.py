"""The function that the benchmark of reports measures with."""

from __future__ import annotations

import pytest
from opening import opening_s

pytestmark = pytest.mark.browser


def test_a_report_opens_in_some_time(browser, show):
    assert 0 < opening_s(show("plan").path, browser) < 60

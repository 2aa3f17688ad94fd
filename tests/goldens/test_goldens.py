"""The code answers what it answered when the goldens were frozen; CONTRIBUTING.md says how to freeze them anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import golden_store
import pytest
from golden_sections import IN_PARTS, SECTIONS

COMPARE = Path(__file__).with_name("compare.py")


PARTS = [*((name, "1") for name in SECTIONS if name not in IN_PARTS), ("files", "3")]
"""Sections, and which of their plans are made: all, or one in so many."""
WHOLE = [pytest.param(name, "1", marks=pytest.mark.slow) for name in IN_PARTS]


@pytest.mark.parametrize(("section", "every"), [*PARTS, *WHOLE])
def test_a_section_is_as_it_was_frozen(section: str, every: str) -> None:
    # A process of its own: click keeps the options of a command as the first context made them.
    compared = subprocess.run([sys.executable, COMPARE, section, "--every", every], capture_output=True, text=True)
    assert compared.returncode == 0, compared.stdout + compared.stderr


def test_a_difference_of_the_last_digit_is_found_unless_it_is_tolerated() -> None:
    before, after = (
        {"key": {"step_time": 0.1, "parts": [0.1, 2]}},
        {"key": {"step_time": 0.1 + 2e-17, "parts": [0.1 + 2e-17, 2]}},
    )
    assert golden_store.differences(before, after) == [
        "key\n  step_time: 0.1 -> 0.10000000000000002\n  parts: [0.1, 2] -> [0.10000000000000002, 2]"
    ]
    assert golden_store.differences(before, after, tolerance=1e-12) == []


def test_a_text_differs_by_its_lines() -> None:
    assert golden_store.differences({"a": "one\ntwo\n", "b": ""}, {"a": "one\n2\n", "c": ""}) == [
        "missing now: b",
        "not in the goldens: c",
        "--- a (frozen)\n+++ a (now)\n@@ -1,2 +1,2 @@\n one\n-two\n+2",
    ]

"""The code answers what it answered when the goldens were frozen; CONTRIBUTING.md says how to freeze them anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMPARE = Path(__file__).with_name("compare.py")


@pytest.mark.parametrize(
    "arguments", [["api", "streams", "files", "--every", "3"], pytest.param(["files"], marks=pytest.mark.slow)]
)
def test_all_is_as_it_was_frozen(arguments: list[str]) -> None:
    # A process of its own: click keeps the options of a command as the first context made them.
    compared = subprocess.run([sys.executable, COMPARE, *arguments], capture_output=True, text=True)
    assert compared.returncode == 0, compared.stdout + compared.stderr

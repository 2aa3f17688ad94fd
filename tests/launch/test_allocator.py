"""Freed memory is used again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, torch
from pipeplan_launch.allocator import keep_freed_memory
assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
counts = [faults() for _ in range(40)]
assert counts[-1] < 100 < counts[0], counts
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_large_blocks_are_kept() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)

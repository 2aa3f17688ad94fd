"""Freed memory is used again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from pipeplan_launch.telemetry.memory import grow_gpu_memory

CODE = """
import resource, torch
from pipeplan_launch.telemetry.memory import keep_freed_memory
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


def test_segments_of_gpus_grow_unless_the_user_says_otherwise() -> None:
    newer, older = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for version, given, found in (
        ("2.13.0+cu130", {}, {newer: "expandable_segments:True"}),
        ("2.8.0", {}, {older: "expandable_segments:True"}),
        ("2.13.0", {older: "backend:native"}, {older: "backend:native"}),
        ("2.8.0", {newer: ""}, {newer: ""}),
    ):
        environment = dict(given)
        grow_gpu_memory(environment, version)
        assert environment == found

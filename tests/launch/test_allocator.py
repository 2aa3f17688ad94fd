"""Freed memory is used again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from pipeplan_launch import allocator

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


@pytest.mark.parametrize(
    ("version", "given", "found"),
    [
        ("2.13.0+cu130", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("2.8.0", {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("2.13.0", {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        ("2.8.0", {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
    ],
)
def test_segments_of_gpus_grow_unless_the_user_says_otherwise(
    version: str, given: dict[str, str], found: dict[str, str]
) -> None:
    allocator.grow_gpu_memory(given, version)
    assert given == found

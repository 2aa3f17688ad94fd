"""What calls take of a device's memory, from the allocator's own records.

On CUDA the allocator counts; on the CPU torch's profiler notes what it hands out and takes back. That is exact and the
same in every run, which what the system calls resident is not: freed blocks that do not fit what comes next stay there.
What a library gets behind the allocator's back (packed matrices inside a product) is in neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.autograd.profiler import profile, record_function

from pipeplan.profiler.layer_run import Measure

MARK = "pipeplan call"


@dataclass(frozen=True)
class Use:
    """Memory of one call, in bytes beyond what was held before it."""

    most: int
    left: int
    """After it."""


def recorded(device: torch.device, run: Callable[[Measure], None]) -> list[Use]:
    """The uses of the calls that `run` measures with what it is given, in turn; empty where nothing could be noted."""
    if device.type == "cuda":
        uses: list[Use] = []
        run(_on_cuda(uses))
        return uses
    # The profiler's library says on standard error that it starts and stops; nothing is above this level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(use_cpu=True, profile_memory=True) as profiled:
        run(_marked)
    return _noted(profiled)


def _on_cuda(uses: list[Use]) -> Measure:
    def measure(call: Callable[[], None]) -> Callable[[], float]:
        # The allocator counts when memory is asked for: there is no need to wait for the device.
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        uses.append(Use(torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before))
        return lambda: 0.0

    return measure


def _marked(call: Callable[[], None]) -> Callable[[], float]:
    with record_function(MARK):
        call()
    return lambda: 0.0


def _noted(profiled: profile) -> list[Use]:
    """What the profiler saw inside each marked call, in their order."""
    results = getattr(profiled, "kineto_results", None)
    events = list(results.events()) if results is not None else []
    calls = sorted((one.start_ns(), one.start_ns() + one.duration_ns()) for one in events if one.name() == MARK)
    changes = [(one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])
    uses, at = [], 0
    for start, end in calls:
        inside = []
        while at < len(changes) and changes[at][0] <= end:
            if changes[at][0] >= start:
                inside.append(changes[at][1])
            at += 1
        uses.append(use_of(inside))
    return uses


def use_of(changes: Iterable[int]) -> Use:
    """Of bytes handed out (positive) and taken back (negative), in order."""
    levels = list(accumulate(changes, initial=0))
    return Use(max(levels), levels[-1])

"""Imported before all else of the profiler: raises an `InputError` where there is no torch that it can use."""

from __future__ import annotations

from pipeplan.errors import InputError
from pipeplan_launch.torch_check import unusable

if why := unusable():
    raise InputError(f"profiling needs torch: {why[0]}; {why[1]}")

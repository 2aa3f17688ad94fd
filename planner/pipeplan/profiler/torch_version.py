"""Check for torch. The profiler imports this module before its others; it raises `InputError` if torch is unusable."""

from __future__ import annotations

from pipeplan.errors import InputError
from pipeplan_launch.torch_check import unusable

if why := unusable():
    raise InputError(f"profiling needs torch: {why[0]}; {why[1]}")

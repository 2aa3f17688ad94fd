"""Check for torch. The profiler imports this module before its others; it raises `InputError` if torch is unusable."""

from __future__ import annotations

from pipeplan.errors import InputError
from pipeplan_launch.torch_check import TRACING, import_problem

if why := import_problem(TRACING):
    raise InputError(f"profiling needs torch: {why[0]}; {why[1]}")

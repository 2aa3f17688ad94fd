"""Check for torch, which the modules of the profiler import."""

from __future__ import annotations

from pipeplan.errors import InputError
from pipeplan_launch.torch_check import TRACING, import_problem


def check_torch() -> None:
    """Raise an `InputError` that says which torch profiling needs, unless there is one."""
    if why := import_problem(TRACING):
        raise InputError(f"profiling needs torch: {why[0]}; {why[1]}")

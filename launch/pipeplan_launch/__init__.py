"""pipeplan_launch: the executor that runs a pipeplan plan.

`Job` and `Data`, which describe a model to run, are importable from here. They are looked up when first asked for,
so that the parts of this package that do without torch stay importable without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeplan_launch.errors import LaunchError
    from pipeplan_launch.job import Data, Job
    from pipeplan_launch.loading import load_job

__all__ = ["Data", "Job", "LaunchError", "load_job"]

_HOMES = {"Data": "job", "Job": "job", "LaunchError": "errors", "load_job": "loading"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

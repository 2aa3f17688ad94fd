"""pipeplan_launch: the executor that runs a pipeplan plan.

It exports `Job` and `Data`, which describe a model to run, and the types of their functions' arguments. These are
loaded on first access, so that the torch-free modules of this package can be imported without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeplan_launch.errors import LaunchError
    from pipeplan_launch.job.callbacks import Callback, EpochResult, MinibatchInfo, RunInfo
    from pipeplan_launch.job.job import Data, Job, StageInfo
    from pipeplan_launch.job.loading import load_job
    from pipeplan_launch.job.presets import muon, nesterov_for_stashing, rate_by_delay

__all__ = [
    "Callback",
    "Data",
    "EpochResult",
    "Job",
    "LaunchError",
    "MinibatchInfo",
    "RunInfo",
    "StageInfo",
    "load_job",
    "muon",
    "nesterov_for_stashing",
    "rate_by_delay",
]

_MODULE_OF = {
    "Callback": "job.callbacks",
    "Data": "job.job",
    "EpochResult": "job.callbacks",
    "Job": "job.job",
    "LaunchError": "errors",
    "MinibatchInfo": "job.callbacks",
    "RunInfo": "job.callbacks",
    "StageInfo": "job.job",
    "load_job": "job.loading",
    "muon": "job.presets",
    "nesterov_for_stashing": "job.presets",
    "rate_by_delay": "job.presets",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)

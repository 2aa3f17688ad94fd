"""pipeplan: finds the fastest plan to train a PyTorch model on several machines, and says how far it is from the best.

All names of `pipeplan.api` are also names of this package. The names are imported on first use, so that the command
line starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeplan._version import __version__ as __version__

if TYPE_CHECKING:
    from pipeplan.api import *  # noqa: F403 (the names of its `__all__`)

_API = (
    *("Cluster", "DisagreementError", "InfeasibleError", "InputError", "Options", "Outcome", "PipeplanError", "Plan"),
    *("NotFoundInTimeError", "Problem", "Profile", "Settings", "Simulated", "SolveProgress", "Stage"),
    *("cluster", "explain", "export", "profile", "read_profile", "render", "render_launcher", "replan", "simulate"),
    *("solve", "sweep"),
)


if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _API:
            return getattr(importlib.import_module("pipeplan.api"), name)
        raise AttributeError(f"module 'pipeplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})

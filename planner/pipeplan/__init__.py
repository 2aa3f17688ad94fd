"""pipeplan: provably best pipeline-parallel training plans.

The names of `pipeplan.api` are names of this package. They are imported on first use, so that the command line starts
quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeplan._version import __version__ as __version__

if TYPE_CHECKING:
    from pipeplan.api import Cluster as Cluster
    from pipeplan.api import DisagreementError as DisagreementError
    from pipeplan.api import InfeasibleError as InfeasibleError
    from pipeplan.api import InputError as InputError
    from pipeplan.api import NotFoundInTimeError as NotFoundInTimeError
    from pipeplan.api import Options as Options
    from pipeplan.api import Outcome as Outcome
    from pipeplan.api import PipeplanError as PipeplanError
    from pipeplan.api import Plan as Plan
    from pipeplan.api import Problem as Problem
    from pipeplan.api import Profile as Profile
    from pipeplan.api import Settings as Settings
    from pipeplan.api import Simulated as Simulated
    from pipeplan.api import SolveProgress as SolveProgress
    from pipeplan.api import Stage as Stage
    from pipeplan.api import cluster as cluster
    from pipeplan.api import explain as explain
    from pipeplan.api import export as export
    from pipeplan.api import profile as profile
    from pipeplan.api import read_profile as read_profile
    from pipeplan.api import render as render
    from pipeplan.api import render_launcher as render_launcher
    from pipeplan.api import replan as replan
    from pipeplan.api import simulate as simulate
    from pipeplan.api import solve as solve
    from pipeplan.api import sweep as sweep

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

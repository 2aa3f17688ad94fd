"""Says when compiled loops are worth their start: importing numba, and once for each version compiling.

Importing numba takes half a second, and compiling the loops half a minute. So a process begins with array code, and
goes on with loops when its searches have become long. Both have the same results, so no answer depends on this.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path

from pipeplan.cost import formulas
from pipeplan.plan import schedules
from pipeplan.solvers.dp import budget
from pipeplan.solvers.dp.states import stage_sizing
from pipeplan.solvers.dp.terms import replicas

LONG = 3e5
"""Work of array code (`SearchEffort.array_work`) after which compiled loops are loaded: about a second's."""
VERY_LONG = 1.2e7
"""Work of array code after which the loops are compiled, if they are not on disk."""

STEADY, BATCHES = "search_cuts", "search_batches"
"""The loops for the steady state and for batches of schedules with a flush, by the functions that are compiled."""

_in_use: set[str] = set()
"""The loops that this process has loaded, and uses from then on."""

_failed: list[str] = []
"""Why loops cannot be used in this process; empty as long as they can."""


def loop_errors() -> tuple[type[Exception], ...]:
    """The errors after which array code does the work of the loops.

    numba refuses versions of NumPy that it does not know when it is imported, and versions of Python when it compiles.
    """
    loaded = sys.modules.get("numba.core.errors")
    return (ImportError,) if loaded is None else (ImportError, loaded.NumbaError)


def give_up(reason: str) -> None:
    """Use array code from now on."""
    _failed.append(reason)


def are_loops_due(array_work: float, loops: str) -> bool:
    """Whether a search should go on with some compiled loops, after so much work without them."""
    if _failed:
        return False
    if loops not in _in_use and array_work >= LONG and has_numba() and (array_work >= VERY_LONG or are_compiled(loops)):
        _in_use.add(loops)
    return loops in _in_use


@cache
def has_numba() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


@cache
def are_compiled(loops: str) -> bool:
    """Whether some compiled loops are on disk."""
    return any(code_folder().rglob(f"*.{loops}-*.nbc"))


@cache
def code_folder() -> Path:
    """The folder for the code that the present sources compile to.

    numba finds its code again only for sources in the same place and of the same time, so both are part of the name:
    code of another installation would count as compiled, and every process would compile for a search of a second.
    """
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    digest = hashlib.sha256(importlib.metadata.version("numba").encode())
    for source in sources():
        digest.update(source.read_bytes() + f"{source} {source.stat().st_mtime_ns}".encode())
    return Path(root) / "pipeplan" / "compiled" / digest.hexdigest()[:16]


def sources() -> list[Path]:
    """The files whose functions or constants are compiled into the code."""
    others = budget, formulas, replicas, schedules, stage_sizing
    return [*sorted(Path(__file__).parent.glob("*.py")), *(Path(str(one.__file__)) for one in others)]


def is_writable(folder: Path) -> bool:
    """Whether the folder exists or can be made, and files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)

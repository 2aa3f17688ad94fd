"""Compiles plain functions with numba, and keeps the code of those that others call on disk.

The code is kept in `$XDG_CACHE_HOME/pipeplan/compiled` (`~/.cache/pipeplan/compiled`), in a folder named by the
content, place and time of every source file that may be compiled into it, because numba itself notices changes of one
file only. Where no such folder can be written, the functions are compiled anew in every process that needs them. With
`NUMBA_DISABLE_JIT=1` in the environment they run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core import options

from pipeplan.solvers.dp.compiled.availability import code_folder, is_writable
from pipeplan.solvers.dp.compiled.old_code import note_use
from pipeplan.solvers.dp.compiled.quick_loading import load_quickly

Loop = TypeVar("Loop", bound=Callable[..., object])

_OPTIONS: dict[str, Any] = {"error_model": "numpy"}
if hasattr(options.DefaultOptions, "_nrt"):
    # The loops make no arrays, so that nothing has to be counted; without this they take a quarter longer.
    _OPTIONS["_nrt"] = False
_INNER = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Without these, code by which Python calls a function is made for each, which takes most of the time."""
_njit: Any = numba.njit
_config: Any = numba.config


def compiled(function: Loop) -> Loop:
    """A function that compiled functions call; it becomes part of their code. Python that calls it crashes."""
    made: Loop = _njit(**_INNER)(function)
    return made


def entry(function: Loop) -> Loop:
    """A function that is compiled at its first call and kept on disk."""
    folder, before = code_folder(), _config.CACHE_DIR
    note_use(folder)
    cache = is_writable(folder)
    # numba reads this while it decorates, and not later.
    _config.CACHE_DIR = str(folder) if cache else before
    try:
        made: Loop = _njit(**_OPTIONS, no_cfunc_wrapper=True, cache=cache)(function)
    finally:
        _config.CACHE_DIR = before
    if cache and "_nrt" in _OPTIONS:
        load_quickly(made)
    return made

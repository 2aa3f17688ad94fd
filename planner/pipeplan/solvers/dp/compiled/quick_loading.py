"""Loads compiled code from disk without preparing numba to compile more.

Before numba loads a function's code, it imports and registers all that it could compile, and SciPy with it where that
is installed, to see whether it is there. That takes a second, and code that is ready needs none of it, as long as it
makes no arrays, for which it would need numba's runtime. Whatever is compiled later prepares itself.
"""

from __future__ import annotations

from typing import Any


def load_quickly(function: Any) -> None:
    """Let a compiled function, whose code makes no arrays, load it without preparations.

    Nothing changes where this version of numba has no such parts by these names.
    """
    cache: Any = getattr(function, "_cache", None)
    load: Any = getattr(cache, "load_overload", None)
    if load is None or not hasattr(getattr(function, "targetctx", None), "refresh"):
        return

    def load_unprepared(signature: object, context: Any) -> object:
        # numba holds its lock meanwhile, so no other thread compiles with this context.
        context.refresh = _nothing
        try:
            return load(signature, context)
        finally:
            del context.refresh

    cache.load_overload = load_unprepared


def _nothing() -> None:
    """Take the place of numba's preparations."""

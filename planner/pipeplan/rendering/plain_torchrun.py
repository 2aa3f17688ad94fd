"""The lines by which plain torchrun starts a plan, to copy: one for each server."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pipeplan.rendering.launcher import Context, Launcher


def _more(context: Context, _settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`starts`: the number of the first worker of every server."""
    return {"starts": list(itertools.accumulate((0, *context.server_sizes[:-1])))}


TORCHRUN = Launcher(
    "torchrun",
    "lines for plain torchrun, to copy, one for each server",
    "torchrun.sh",
    "torchrun.sh.j2",
    more=_more,
)

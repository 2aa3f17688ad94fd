"""torchrun.sh: the commands that start a plan by plain torchrun, one for each server, to copy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pipeplan.rendering.launcher import Launcher, TemplateContext


def _torchrun_variables(context: TemplateContext, _settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`starts`: the number of the first worker of every server."""
    return {"starts": list(itertools.accumulate((0, *context.server_sizes[:-1])))}


TORCHRUN = Launcher(
    "torchrun",
    "lines for plain torchrun, to copy, one for each server",
    "torchrun.sh",
    "torchrun.sh.j2",
    more=_torchrun_variables,
)

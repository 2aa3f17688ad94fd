"""The launchers of plain torchrun: launch-ssh.sh, for hosts that are reached over ssh, and torchrun.sh, to copy from.

launch-ssh.sh takes the names of the hosts when it runs. torchrun.sh has one command for each server.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pipeplan.rendering.launcher import Launcher, TemplateContext
from pipeplan_launch.job_reference import file_of


def _ssh_variables(context: TemplateContext, _settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`model_file`: the file in the reference of the model; empty where the reference names a module."""
    file = file_of(context.model_ref)
    return {"model_file": "" if file is None else str(file)}


SSH = Launcher(
    "ssh",
    "all servers from one place, by ssh; the hosts are named when it is run",
    "launch-ssh.sh",
    "launch-ssh.sh.j2",
    mode=0o755,
    more=_ssh_variables,
)


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

"""The list of launchers. A new one needs a template and an entry here, and a module where it has options of its own.

launch-ssh.sh takes the names of the hosts when it runs. torchrun.sh has one command for each server.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from pipeplan.errors import InputError
from pipeplan.rendering.kubernetes import KUBERNETES
from pipeplan.rendering.launcher import Launcher, TemplateContext
from pipeplan.rendering.slurm import SLURM
from pipeplan.util.text import did_you_mean
from pipeplan_launch.job_reference import file_of


def _ssh_variables(context: TemplateContext, _settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`model_file`: the file in the reference of the model; empty where the reference names a module."""
    return {"model_file": str(file_of(context.model_ref) or "")}


def _torchrun_variables(context: TemplateContext, _settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`starts`: the number of the first worker of every server."""
    return {"starts": list(itertools.accumulate((0, *context.server_sizes[:-1])))}


LOCAL = Launcher(
    "local",
    "one machine, or one server of several by NODE_RANK, MASTER_ADDR and MASTER_PORT",
    "launch.sh",
    "launch.sh.j2",
    mode=0o755,
)
SSH = Launcher(
    "ssh",
    "all servers from one place, by ssh; the hosts are named when it is run",
    "launch-ssh.sh",
    "launch-ssh.sh.j2",
    mode=0o755,
    more=_ssh_variables,
)
TORCHRUN = Launcher(
    "torchrun",
    "lines for plain torchrun, to copy, one for each server",
    "torchrun.sh",
    "torchrun.sh.j2",
    more=_torchrun_variables,
)
LAUNCHERS: Mapping[str, Launcher] = {launcher.name: launcher for launcher in (LOCAL, SSH, SLURM, TORCHRUN, KUBERNETES)}


def launcher_by_name(name: str) -> Launcher:
    """The launcher of that name. Raises `InputError`."""
    if name not in LAUNCHERS:
        raise InputError(f"there is no kind {name!r} of file to start a plan; {did_you_mean(name, LAUNCHERS)}")
    return LAUNCHERS[name]

"""The list of launchers. A new one needs a template, a module with its `Launcher`, and an entry here."""

from __future__ import annotations

from collections.abc import Mapping

from pipeplan.errors import InputError
from pipeplan.rendering.kubernetes import KUBERNETES
from pipeplan.rendering.launcher import Launcher, LauncherSetting
from pipeplan.rendering.slurm import SLURM
from pipeplan.rendering.ssh_torchrun import SSH, TORCHRUN
from pipeplan.util.text import did_you_mean

LOCAL = Launcher(
    "local",
    "one machine, or one server of several by NODE_RANK, MASTER_ADDR and MASTER_PORT",
    "launch.sh",
    "launch.sh.j2",
    mode=0o755,
    settings=(
        LauncherSetting("python", "Run the plan with this interpreter  [default: this interpreter]", metavar="PATH"),
    ),
)

LAUNCHERS: Mapping[str, Launcher] = {launcher.name: launcher for launcher in (LOCAL, SSH, SLURM, TORCHRUN, KUBERNETES)}


def launcher_by_name(name: str) -> Launcher:
    """The launcher of that name. Raises `InputError`."""
    if name not in LAUNCHERS:
        raise InputError(f"there is no kind {name!r} of file to start a plan; {did_you_mean(name, LAUNCHERS)}")
    return LAUNCHERS[name]

"""The launchers, with the variables of a SLURM job, which has one task on each node.

A new launcher needs a template and an entry in `LAUNCHERS`. The launcher for Kubernetes is in
`pipeplan.rendering.kubernetes`. launch-ssh.sh takes the names of the hosts when it runs. In launch.slurm, consecutive
servers with the same number of workers of the same device are one component of the job. A job with several components
is heterogeneous.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from typing import Any

from pipeplan.errors import InputError
from pipeplan.rendering.kubernetes import KUBERNETES
from pipeplan.rendering.launcher import Launcher, LauncherSetting, TemplateContext
from pipeplan.util.text import did_you_mean, one_line

CORES_PER_GPU = 4
"""Default number of cores of a worker on a GPU: one computes, the others read samples and send messages."""
_LONGEST_NAME = 40

SETTINGS = (
    LauncherSetting("partition", "Submit to this partition.", metavar="NAME"),
    LauncherSetting("time", "Limit the time: 12:00:00, 2-00:00:00, or minutes.", metavar="LIMIT"),
    LauncherSetting(
        "gpu_type",
        "Ask for GPUs of this type; where servers differ, give DEVICE=TYPE for each device.",
        many=True,
        metavar="TYPE",
    ),
    LauncherSetting(
        "cpus",
        f"Give a worker this number of cores  [default: its threads; on a GPU at least {CORES_PER_GPU}]",
        "count",
    ),
    LauncherSetting(
        "sbatch", "Pass on any other option of sbatch, such as --sbatch=--account=me.", many=True, metavar="OPTION"
    ),
    LauncherSetting(
        "setup", "Run this line of shell first on every node, such as 'module load cuda'.", many=True, metavar="LINE"
    ),
    LauncherSetting(
        "grace", "End at a checkpoint this many seconds before the time limit.", "count", default=120, metavar="S"
    ),
    LauncherSetting(
        "no_requeue", "Never queue the job again after the time limit, preemption or the loss of a node.", "flag"
    ),
)
TIME_LIMIT = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
"""Time limit of sbatch: minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:minutes[:seconds]]."""
COMPONENT_OPTIONS = ("partition", "time")
"""Options that every component of a heterogeneous job must repeat."""


def _slurm_variables(context: TemplateContext, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Further variables of the template.

    shared: the options of sbatch that all components have
    job_name: a name made of the model's
    components: for each component, (nodes, workers of one node)
    component_devices: for each component, (name of the device, type of the GPUs or "")
    cores: cores of one worker
    """
    types = _gpu_types(context, settings["gpu_type"])
    for name, value in [*((name, settings[name]) for name in COMPONENT_OPTIONS), *(("gpu_type", t) for t in types)]:
        # SLURM splits an `#SBATCH` line at spaces and ends the line at a number sign.
        if value and not re.fullmatch(r"[^\s\"'#\\]+", value):
            raise InputError(f"--{name.replace('_', '-')} must be one word without quotes, not {value!r}")
    if settings["time"] and not TIME_LIMIT.fullmatch(settings["time"]):
        raise InputError(
            f"--time: expected a limit such as 12:00:00, 2-00:00:00 or minutes, found {settings['time']!r}"
        )
    for option in settings["sbatch"]:
        if not re.fullmatch(r"-[^\"'#\\]+", option):
            raise InputError(f"--sbatch takes an option of sbatch, such as --sbatch=--exclusive, not {option!r}")
    kinds = itertools.groupby(zip(context.server_sizes, context.server_devices, types, strict=True))
    groups = [(len(list(group)), kind) for kind, group in kinds]
    default_cores = context.threads if context.device == "cpu" else max(context.threads, CORES_PER_GPU)
    shared = {name: settings[name] for name in COMPONENT_OPTIONS if settings[name] is not None}
    return {
        "shared": [f"--{name}={value}" for name, value in shared.items()] + list(settings["sbatch"]),
        "job_name": re.sub(r"[^A-Za-z0-9._-]+", "-", f"pipeplan-{context.model}")[:_LONGEST_NAME].rstrip("-"),
        "components": [(nodes, workers) for nodes, (workers, _, _) in groups],
        "component_devices": [(device, type_) for _, (_, device, type_) in groups],
        "cores": settings["cpus"] or default_cores,
    }


def _gpu_types(context: TemplateContext, named: tuple[str, ...]) -> list[str]:
    """The type of the GPUs of every server; empty texts if no type is named or needed.

    Raises `InputError` if servers have different GPUs and some type is not named.
    """
    devices = list(dict.fromkeys(context.server_devices))
    if context.device != "cuda" or len(devices) == 1:
        if len(named) > 1:
            raise InputError("--gpu-type: all servers of this plan have the same devices: name one type")
        return [text.removeprefix(f"{devices[0]}=") for text in named or ("",)] * context.servers
    types = {device: kind for device, _, kind in (text.rpartition("=") for text in named)}
    if set(types) != set(devices):
        example = " ".join(f"--gpu-type {shlex.quote(device + '=TYPE')}" for device in devices)
        raise InputError(f"servers of this plan have different devices: name the type of each, {one_line(example)}")
    return [types[device] for device in context.server_devices]


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
)
SLURM = Launcher(
    "slurm",
    "a job for SLURM's sbatch, which goes on by itself after its time limit",
    "launch.slurm",
    "launch.slurm.j2",
    mode=0o755,
    settings=SETTINGS,
    more=_slurm_variables,
)
LAUNCHERS: Mapping[str, Launcher] = {launcher.name: launcher for launcher in (LOCAL, SSH, SLURM, KUBERNETES)}


def launcher_by_name(name: str) -> Launcher:
    """The launcher of that name. Raises `InputError`."""
    if name not in LAUNCHERS:
        raise InputError(f"there is no kind {name!r} of file to start a plan; {did_you_mean(name, LAUNCHERS)}")
    return LAUNCHERS[name]

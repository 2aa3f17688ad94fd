"""launch.slurm: starts a plan as a SLURM job, with one task on each node.

Consecutive servers with the same number of workers are one component of the job. Several components make it a
heterogeneous job.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from pipeplan.errors import InputError
from pipeplan.rendering.launcher import Launcher, LauncherSetting, TemplateContext

CORES_PER_GPU = 4
"""Default cores of a worker on a GPU: one computes, the others read samples and send."""
_LONGEST_NAME = 40

SETTINGS = (
    LauncherSetting("partition", "Partition.", metavar="NAME"),
    LauncherSetting("account", "Account to charge.", metavar="NAME"),
    LauncherSetting("qos", "Quality of service.", metavar="NAME"),
    LauncherSetting("time", "Time limit: 12:00:00, 2-00:00:00, minutes.", metavar="LIMIT"),
    LauncherSetting("constraint", "Features that nodes must have.", metavar="FEATURES"),
    LauncherSetting("gpu_type", "Type of the GPUs, as the cluster calls it.", metavar="NAME"),
    LauncherSetting("cpus", f"Cores of a worker.  [default: its threads; on a GPU at least {CORES_PER_GPU}]", "count"),
    LauncherSetting("mem", "Memory of a node: 64G; 0: all.", metavar="SIZE"),
    LauncherSetting("sbatch", "Any other option of sbatch, such as --sbatch=--exclusive.", many=True, metavar="OPTION"),
    LauncherSetting(
        "setup", "A line of shell to run first on every node, such as 'module load cuda'.", many=True, metavar="LINE"
    ),
    LauncherSetting(
        "grace", "Seconds before the time limit to end at a checkpoint.", "count", default=120, metavar="S"
    ),
    LauncherSetting(
        "no_requeue", "Do not queue the job again after the time limit, preemption or the loss of a node.", "flag"
    ),
)
COMPONENT_OPTIONS = ("partition", "account", "qos", "time", "constraint", "mem")
"""Options that every component of a heterogeneous job must repeat."""


def _slurm_variables(context: TemplateContext, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Further variables of the template.

    shared: the options of sbatch that all components have
    job_name: a name made of the model's
    components: for each component, (nodes, workers of one node)
    cores: cores of one worker
    """
    for name in (*COMPONENT_OPTIONS, "gpu_type"):
        # SLURM splits an `#SBATCH` line at spaces and ends it at a number sign.
        if settings[name] is not None and not re.fullmatch(r"[^\s\"'#\\]+", settings[name]):
            raise InputError(f"--{name.replace('_', '-')} must be one word without quotes, not {settings[name]!r}")
    for option in settings["sbatch"]:
        if not re.fullmatch(r"-[^\"'#\\]+", option):
            raise InputError(f"--sbatch takes an option of sbatch, such as --sbatch=--exclusive, not {option!r}")
    default_cores = context.threads if context.device == "cpu" else max(context.threads, CORES_PER_GPU)
    shared = {name: settings[name] for name in COMPONENT_OPTIONS if settings[name] is not None}
    return {
        "shared": [f"--{name}={value}" for name, value in shared.items()] + list(settings["sbatch"]),
        "job_name": re.sub(r"[^A-Za-z0-9._-]+", "-", f"pipeplan-{context.model}")[:_LONGEST_NAME].rstrip("-"),
        "components": [(len(list(group)), size) for size, group in itertools.groupby(context.server_sizes)],
        "cores": settings["cpus"] or default_cores,
    }


SLURM = Launcher(
    "slurm",
    "a job for SLURM's sbatch, which goes on by itself after its time limit",
    "launch.slurm",
    "launch.slurm.j2",
    mode=0o755,
    settings=SETTINGS,
    more=_slurm_variables,
)

"""The starter files of a new user: a job file that trains without changes, and a cluster file of this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster, Device
from pipeplan.cluster_data.cluster_toml import LOCAL_COSTS
from pipeplan.cluster_data.local import local_cluster
from pipeplan.util.files import bundled_folder, read_text, write_together
from pipeplan.util.text import shell_path
from pipeplan.util.units import parse_size, show_size

JOB, CLUSTER = "job.py", "cluster.toml"

_DEVICE = (
    "The device of one worker. kind: cuda or cpu. memory: how much of it a plan may use for one worker.",
    "Servers that differ get [[device]] and [[server]] tables: docs/file-formats.md.",
)
_DEVICES = (
    "The devices of workers. kind: cuda or cpu. memory: how much of it a plan may use for one worker. speed: relative",
    "to the device of the profile. `pipeplan profile` on each, with another CUDA_VISIBLE_DEVICES, measures the ratio.",
)
_SERVER = (
    "One server whose devices differ. bandwidth: of one device's link in each direction.",
    "`pipeplan profile --links` measures the links and writes a cluster file.",
)
_WORKERS = (
    "The links between the workers of one server. count: number of workers. bandwidth: of one worker's link,",
    "in each direction.",
    "`pipeplan profile --links` measures these figures and writes a cluster file.",
)
_EXECUTOR = "Costs of the executor itself, besides the layers, as `pipeplan profile` measures them on this machine."
_SERVERS = """\

# More servers like this one: uncomment the lines below, and set their number and the links between them.
# [[level]]
# name = "cluster"
# count = 2
# bandwidth = "10 Gbit/s"
# latency = "50 us"
"""


def starter_files(workers: int | None = None) -> dict[str, str]:
    """The texts of the files by their names, for `workers` on this machine.

    By default there is one worker for each GPU, or for each processor core. Raises `InputError` for an invalid number.
    """
    return {JOB: read_text(bundled_folder("templates") / "init" / JOB), CLUSTER: cluster_text(local_cluster(workers))}


def cluster_text(cluster: Cluster) -> str:
    """A cluster file with explanatory comments, for a cluster of one server."""
    devices = [_rounded(device) for device in cluster.devices]
    noun = "GPU" if cluster.device.kind == "cuda" else "worker"
    kinds = Counter((show_size(device.memory_bytes), device.name) for device in devices)
    parts = [f"{n} {noun}{'' if n == 1 else 's'} of {memory}, {name}" for (memory, name), n in kinds.items()]
    remarks = [
        f"This machine, as pipeplan found it: {'; '.join(parts)}.",
        "`pipeplan solve --cluster` takes this file.",
    ]
    inside = cluster.levels[cluster.server_level - 1]
    text = cluster_toml.cluster_toml(Cluster.of_devices("mine", devices, inside, cluster.executor), remarks)
    if cluster.device.kind == "cpu":
        text = text.replace('\nname = "mine"\n', f'\nname = "mine"\n# {_EXECUTOR}\nexecutor = "{LOCAL_COSTS}"\n', 1)
    tables = (("[device]", _DEVICE), ("[[device]]", _DEVICES), ("[[server]]", _SERVER), ("[[level]]", _WORKERS))
    for table, lines in tables:
        text = text.replace(f"\n{table}\n", "\n" + "".join(f"# {line}\n" for line in lines) + f"{table}\n", 1)
    return text + (_SERVERS if cluster.uniform else "")


def _rounded(device: Device) -> Device:
    """The device with its memory rounded to tenths of a GiB, for readability."""
    tenths = device.memory_bytes * 10 >> 30
    return replace(device, memory_bytes=parse_size(f"{tenths / 10} GiB", CLUSTER)) if tenths >= 10 else device


def next_commands(folder: Path, kind: str) -> list[str]:
    """The commands that measure, plan and train, for a user in the current folder; `kind` is `cuda` or `cpu`."""
    is_current = folder == Path()
    job, profile, cluster, plan = (
        shell_path(folder / name) for name in (f"{JOB}:build", "profile.json", CLUSTER, "plan")
    )
    device = " --device cuda" if kind == "cuda" else ""
    script = "./plan" if is_current else plan if plan[0] in "/.'" else f"./{plan}"
    return [
        f"pipeplan profile {job}{device}" + ("" if is_current else f" -o {profile}"),
        f"pipeplan solve {profile} --cluster {cluster}" + ("" if is_current else f" -o {plan}"),
        f"{script}/launch.sh --epochs 5",
    ]


def write_starter_files(folder: Path, texts: Mapping[str, str], *, force: bool = False) -> None:
    """Write all files or none. `force` replaces existing files. Raises `InputError`."""
    write_together(folder, {name: (text, 0o666) for name, text in texts.items()}, force=force)

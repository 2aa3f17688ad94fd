"""What a new user begins with: a job file that trains as it is, and a cluster file of this machine."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeplan import cluster_write, resources
from pipeplan.cluster_data import Cluster
from pipeplan.errors import InputError
from pipeplan.files import read_text
from pipeplan.local import local
from pipeplan.units import parse_size, show_size

JOB, CLUSTER = "job.py", "cluster.toml"

_DEVICE = (
    "What one worker computes on. kind: cuda or cpu. memory: what a plan may use of it, for one worker.",
    "Servers that differ get [[device]] and [[server]] tables: docs/file-formats.md.",
)
_WORKERS = (
    "What joins the workers of one server. count: how many they are. bandwidth: of one worker's link, each way.",
    "`pipeplan profile --links` measures all of it, and writes a cluster file.",
)
_SERVERS = """\

# More servers like this one: take the # off the lines below, and say how many there are and what joins them.
# [[level]]
# name = "cluster"
# count = 2
# bandwidth = "10 Gbit/s"
# latency = "50 us"
"""


def files(workers: int | None = None) -> dict[str, str]:
    """The texts, by name of the file. `workers` of this machine: by default one a GPU, or one a processor core.

    Raises `InputError` where that is no number of workers.
    """
    return {JOB: read_text(resources.folder("templates") / "init" / JOB), CLUSTER: cluster_text(local(workers))}


def cluster_text(cluster: Cluster) -> str:
    """A cluster of one server as a file that explains itself."""
    workers = cluster.workers
    device = replace(cluster.device, memory_bytes=_rounded(cluster.device.memory_bytes))
    what = "GPU" if device.kind == "cuda" else "worker"
    found = f"{workers} {what}{'' if workers == 1 else 's'} of {show_size(device.memory_bytes)}, {device.name}"
    remarks = [f"This machine, as pipeplan found it: {found}.", "`pipeplan solve --cluster` takes this file."]
    text = cluster_write.text_of(replace(cluster, name="mine", device=device), remarks)
    for table, lines in (("[device]", _DEVICE), ("[[level]]", _WORKERS)):
        text = text.replace(f"\n{table}\n", "\n" + "".join(f"# {line}\n" for line in lines) + f"{table}\n", 1)
    return text + _SERVERS


def _rounded(memory_bytes: int) -> int:
    """Down to a tenth of a GiB, for people to read; as it is where there is less than one."""
    tenths = memory_bytes * 10 >> 30
    return parse_size(f"{tenths / 10} GiB", CLUSTER) if tenths >= 10 else memory_bytes


def commands(folder: Path, kind: str) -> list[str]:
    """What to type next, from where the user stands: measure, plan, train. `kind` of device: `cuda` or `cpu`."""
    here = folder == Path()
    job, profile, cluster, plan = (_quoted(folder / name) for name in (f"{JOB}:build", "profile.json", CLUSTER, "plan"))
    device = " --device cuda" if kind == "cuda" else ""
    script = "./plan" if here else plan if folder.is_absolute() else f"./{plan}" if plan[0] != "'" else plan
    return [
        f"pipeplan profile {job}{device}" + ("" if here else f" -o {profile}"),
        f"pipeplan solve {profile} --cluster {cluster}" + ("" if here else f" -o {plan}"),
        f"{script}/launch.sh --epochs 5",
    ]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def write(folder: Path, texts: Mapping[str, str], *, force: bool = False) -> None:
    """Write all of the files, or none; with `force` in place of those that are there. Raises `InputError`."""
    _refuse(folder, texts, force)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-files.", dir=folder))
        try:
            for name, text in texts.items():
                (scratch / name).write_text(text, encoding="utf-8")
            for name in texts:
                (scratch / name).replace(folder / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            _remove_empty(made)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error


def _remove_empty(places: Sequence[Path]) -> None:
    for place in places:
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def _refuse(folder: Path, names: Mapping[str, str], force: bool) -> None:
    for place in (folder, *folder.parents):
        if place.exists() or place.is_symlink():
            if not place.is_dir():
                raise InputError(f"{place} is not a folder: give another one")
            break
    for name in names:
        path = folder / name
        if path.is_dir():
            raise InputError(f"{path} is a folder, and a file of that name is to be written: give another folder")
        if (path.exists() or path.is_symlink()) and not force:
            raise InputError(f"{path} exists: give another folder, or --force to replace it")

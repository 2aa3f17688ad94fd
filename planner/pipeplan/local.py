"""This machine as a cluster: its processors, or its GPUs where it has some."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from pipeplan.cluster_data import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.units import parse_size

_LOOPBACK = Level(
    name="server",
    count=1,
    bandwidth=2e9,
    latency_s=50e-6,
    allreduce_efficiency=0.3,
    sendrecv_efficiency=0.7,
    source="Gloo between processes of one 2-core machine: send/recv 1.4-3.2 GB/s, all-reduce 0.2-1.2 GB/s",
)
_PCIE = Level(name="server", count=1, bandwidth=12e9, source="PCIe 3.0 x16: about 12 GB/s of its 15.75 GB/s")


@dataclass(frozen=True)
class Hardware:
    """What workers of this machine compute on: all its processors, or one of its GPUs."""

    name: str
    kind: str
    memory_bytes: int
    cores: int
    """That CPU workers share; 1 for a GPU, which is one worker's."""

    def shared_by(self, workers: int) -> Device:
        """The device of one of so many workers. Memory is divided evenly; more workers than cores share these."""
        if self.kind == "cuda":
            return Device(self.name, self.kind, self.memory_bytes)
        shared = self.cores if workers > self.cores else 0
        return Device(self.name, self.kind, self.memory_bytes // workers, cores=shared)


def local(workers: int | None) -> Cluster:
    """This machine with `workers` workers; by default one a GPU, or one a processor core where there is no GPU.

    More CPU workers than cores share the cores (`Device.cores`): a layer takes as much time of a core as it did when it
    was measured, and a worker that waits leaves its core to another. Memory is divided evenly.
    """
    if workers is not None and workers < 1:
        raise InputError(f"the number of workers must be at least 1, not {workers}")
    found = gpus()
    if found and (workers is None or workers <= len(found)):
        count = workers or len(found)
        return _cluster(found[0].shared_by(count), _PCIE, count)
    here = processors()
    count = workers or here.cores
    return _cluster(here.shared_by(count), _LOOPBACK, count)


def processors() -> Hardware:
    """The processors that this process may use, and the machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(_processor(), "cpu", total, len(os.sched_getaffinity(0)))


def _cluster(device: Device, level: Level, workers: int) -> Cluster:
    return Cluster(name="local", device=device, levels=(replace(level, count=workers),))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine() or "cpu"


def gpus() -> list[Hardware]:
    """Every GPU, by NVIDIA's own tool: importing torch for it would cost seconds."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in answer.splitlines() if line.count(",")]
    return [
        Hardware(name.strip(), "cuda", parse_size(f"{memory.strip()} MiB", "nvidia-smi"), 1) for name, memory in rows
    ]

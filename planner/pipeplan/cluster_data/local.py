"""The local machine as a cluster: its GPUs, or its processors if it has no GPU."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeplan.cluster_data.cluster import MEMORY_RESERVE, Cluster, Device, Level
from pipeplan.cluster_data.devices import bundled_model_of
from pipeplan.errors import InputError
from pipeplan.util.units import parse_size

LOCAL = "local"
"""The name of the cluster that is this machine."""
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
    """All processors of this machine, or one of its GPUs."""

    name: str
    kind: str
    """Kind of device: `cuda` or `cpu`."""
    memory_bytes: int
    """Memory of the machine, or of the GPU."""
    cores: int
    """Number of cores that CPU workers share; 1 for a GPU, which belongs to one worker."""

    def shared_by(self, workers: int) -> Device:
        """The device of each of `workers` workers.

        CPU workers divide the memory evenly. If there are more workers than cores, they share the cores."""
        if self.kind == "cuda":
            return Device(self.name, self.kind, self.memory_bytes, memory_reserve=MEMORY_RESERVE)
        shared = self.cores if workers > self.cores else 0
        return Device(self.name, self.kind, self.memory_bytes // workers, cores=shared, memory_reserve=MEMORY_RESERVE)


def local_cluster(workers: int | None) -> Cluster:
    """This machine with `workers` workers; by default one per GPU, or one per processor core if there is no GPU.

    If there are more CPU workers than cores, they share the cores (`Device.cores`). A layer needs its measured time on
    a core, and a waiting worker leaves its core to another worker. Memory is divided evenly. If there are more workers
    than GPUs, all run on the processors. Raises an `InputError` for fewer than one worker.
    """
    if workers is not None and workers < 1:
        raise InputError(f"the number of workers must be at least 1, not {workers}")
    available = local_gpus()
    if available and (workers is None or workers <= len(available)):
        return Cluster.of_devices(LOCAL, devices_of(available[: workers or len(available)]), _PCIE)
    cpu = local_processors()
    count = workers or cpu.cores
    return Cluster.of_devices(LOCAL, [cpu.shared_by(count)] * count, _LOOPBACK)


def devices_of(gpus: Sequence[Hardware]) -> list[Device]:
    """The devices of some GPUs. GPUs of the same name get the smallest memory among them.

    Speeds are relative to the fastest GPU if bundled device files have the peaks of all; otherwise they are 1.
    """
    least = {gpu.name: min(one.memory_bytes for one in gpus if one.name == gpu.name) for gpu in gpus}
    known = {name: bundled_model_of(name) for name in least}
    peaks = {name: model.peak.float32.flops for name, model in known.items() if model is not None}
    fastest = max(peaks.values(), default=1.0) if len(peaks) == len(least) else None
    return [
        replace(
            gpu.shared_by(1),
            memory_bytes=least[gpu.name],
            speed=round(peaks[gpu.name] / fastest, 3) if fastest and len(least) > 1 else 1.0,
        )
        for gpu in gpus
    ]


def local_processors() -> Hardware:
    """The processors that this process may use, and the machine's memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(_processor(), "cpu", total, len(os.sched_getaffinity(0)))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine() or "cpu"


def local_gpus() -> list[Hardware]:
    """The GPUs that `nvidia-smi` lists. Importing torch for this would take seconds."""
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

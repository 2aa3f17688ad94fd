"""A small plan for two servers whose model trains in a moment, helpers for its runs, and what tests here need."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path

import pytest
from blocks import shell_blocks
from launching import SLOW_JOB
from repository import ROOT

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Provenance, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_folder
from pipeplan.rendering.launchers import launcher_by_name
from pipeplan.rendering.plan_folder import write_plan

JOB = SLOW_JOB.replace("import time", "import os, time").replace("0.002", "float(os.environ.get('SAMPLE_S', '0'))")
PATIENCE_S = 120


def small_plan(folder: Path, job: Path, sizes: Sequence[int] = (1, 1), device: str = "cpu") -> Path:
    """Write a plan with one stage on each server. `sizes` are the workers of the servers."""
    job.parent.mkdir(parents=True, exist_ok=True)
    job.write_text(JOB)
    layers = (Layer("0", 1e-3, 2e-3, 160, 0), Layer("1", 1e-3, 2e-3, 0, 0))
    layers += (Layer("2", 1e-3, 2e-3, 108, 0), Layer("loss", 1e-3, 2e-3, 0, 0))
    names = [layer.name for layer in layers]
    tensors = tuple(Tensor(one, one, (after,), 128, 128) for one, after in itertools.pairwise(names))
    profile = Profile(
        layers, tensors, 4, f"{job}:job", "small", provenance=Provenance(threads=1, how="made up", device=device)
    )
    core = Device("core", device, 2**30)
    cluster = Cluster("pair", core, (Level("server", max(sizes), 1e9), Level("pair", len(sizes), 1e9)))
    if len(set(sizes)) > 1:
        machines = [Server(core, Level("server", size, 1e9)) for size in sizes]
        cluster = Cluster.of_servers("pair", machines, [Level("pair", len(sizes), 1e9)])
    write_plan(solve(Problem(profile, cluster, Options(stages=len(sizes))), Settings()), folder)
    return folder


def need(package: str, version: str) -> None:
    """Skip the test unless this version of another trainer is installed."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed (pip install -e '.[deploy]')")
    if found != version:
        pytest.skip(f"the export is for {package} {version}, and {found} is installed")


def free_ports(count: int = 1) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


def rendered(plan: Path, kind: str, **settings: object) -> Path:
    """Render a launcher of that kind into the plan folder; returns its path."""
    one = launcher_by_name(kind)
    return plan_folder.write_launch_file(plan, one, settings)


def checkpoints(run: Path) -> list[str]:
    return sorted(path.parent.name for path in run.glob("checkpoints/epoch-*/manifest.json"))


def summary(run: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((run / "summary.json").read_text())
    return content


def runs(plan: Path) -> list[Path]:
    return sorted((plan / "runs").iterdir()) if (plan / "runs").is_dir() else []


def until(condition: Callable[[], object], awaited: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"no {awaited}"
        time.sleep(0.05)


def working_on(folder: Path) -> list[int]:
    """Ids of the processes with this folder in an argument: launchers and workers of its plan."""
    numbers = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.fsencode(folder) in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                numbers.append(int(entry.name))
    return numbers


def page_blocks(test: str) -> list[list[str]]:
    """The commands in docs/servers.md, by block, for the blocks whose mark names this file of tests."""
    return [
        block.commands
        for block in shell_blocks(ROOT / "docs" / "servers.md")
        if any(f"tests/deploy/{test}" in reason for reason in block.marked("not run"))
    ]

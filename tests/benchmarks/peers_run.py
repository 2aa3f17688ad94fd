"""Starting both sides of a comparison, on this machine or over a shaped link, and reading what they measured."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import peers_torch
from jobs import JOBS, SUBJECTS
from network_namespaces import CABLE_INTERFACE, OWN_NAMESPACES, Network, NetworkNode, missing_requirement

from pipeplan_launch.plan.stage_files import load_plan

Command = tuple[str, ...]
WORKERS = 2
LIMIT_S = 300.0
"""Whatever takes longer has failed."""
_SERVERS = """\
format = "pipeplan-cluster"
version = 1
name = "shaped-servers"

[device]
name = "one core"
kind = "cpu"
memory = "4 GiB"

[[level]]
name = "server"
count = 1

[[level]]
name = "cluster"
count = {servers}
bandwidth = "{rate}"
"""


def cluster_file(rate: str, servers: int = WORKERS) -> str:
    """The text of a cluster file: servers of one worker each, joined by links of a `rate` such as 1 Gbit/s."""
    return _SERVERS.format(servers=servers, rate=rate)


@dataclass(frozen=True)
class Measured:
    """One run of one contender."""

    ends: tuple[float, ...]
    """When each update ended, in seconds, on the last worker: the one that has the last stage."""
    losses: tuple[float, ...]
    """Mean loss of each update's samples, each at the weights of its turn."""
    memory_bytes: tuple[float, ...]
    """Of every worker: the peak of what training added to the process, the model's own included."""

    def update_s(self, warm: int) -> float:
        """Seconds from one update to the next, without the first `warm`."""
        return (self.ends[-1] - self.ends[warm - 1]) / (len(self.ends) - warm)


class Ground(Protocol):
    """Where the two workers run."""

    servers: int

    def run(self, command: Command) -> None:
        """Run a command on every server at once, and wait. Raises RuntimeError if it fails on any."""


class Here:
    """Both workers on this machine, over loopback."""

    servers = 1

    def run(self, command: Command) -> None:
        wait([start(command, {"GLOO_SOCKET_IFNAME": "lo"})])


class Shaped:
    """Every server in a network namespace of its own, with a cable to a switch that is shaped both ways."""

    def __init__(self, rate: str, servers: int = WORKERS, burst: str = "64k") -> None:
        """`rate`: as tc writes it, 1gbit; `burst`: bytes that a link which was idle sends at once.

        The process must be started as `in_own_network` starts one.

        Raises RuntimeError where the machine does not allow it.
        """
        self.servers = servers
        self._secret = secrets.token_hex(32)
        self._network = Network(NetworkNode(below=(NetworkNode(rate, workers=1, burst=burst),) * servers))

    def run(self, command: Command, first: int | None = None) -> None:
        """As for every ground; only on the `first` servers, where that is given."""
        meeting = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": CABLE_INTERFACE}
        meeting["PIPEPLAN_SECRET"] = self._secret
        wait(
            [
                start(("ip", "netns", "exec", name, *command), meeting | {"NODE_RANK": str(rank)})
                for rank, (name, _) in enumerate(self._network.servers[:first])
            ]
        )


INSIDE = "PIPEPLAN_BENCHMARK_INSIDE"
"""The variable that says that this process is in the network that `in_own_network` made."""


def in_own_network(arguments: Sequence[str]) -> int:
    """Run this command, with other arguments, as root of a network of its own; returns the exit status.

    Says that it is skipped where the machine does not allow it.
    """
    if why := missing_requirement():
        print(f"skipped: this machine does not let us make network namespaces: {why}", file=sys.stderr)
        return 0
    command = (*OWN_NAMESPACES, "--mount-proc", sys.executable, sys.argv[0], *arguments)
    return subprocess.run(command, env=os.environ | {INSIDE: "1"}, check=False).returncode


def torchrun(ground: Ground, workers: int) -> Command:
    """The start of a command that runs a script on so many workers, of every server as many."""
    start = (sys.executable, "-m", "torch.distributed.run")
    if ground.servers == 1:
        return (*start, "--standalone", "--nproc-per-node", str(workers))
    # A shell, because every server has its own NODE_RANK.
    line = f"{' '.join(start)} --nnodes {ground.servers} --nproc-per-node {workers // ground.servers}"
    line += ' --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"'
    return ("bash", "-c", line, "peers")


@dataclass(frozen=True)
class Started:
    """A command under way."""

    process: subprocess.Popen[bytes]
    said: IO[bytes]
    """What it prints: a file, as nobody reads a pipe meanwhile."""


def start(command: Command, variables: Mapping[str, str]) -> Started:
    """Start a command; one thread per worker."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable} | variables
    said = tempfile.TemporaryFile()  # noqa: SIM115  closed by `wait`
    return Started(subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT), said)


def wait(started: Sequence[Started]) -> None:
    """Until all have ended, well or not. Raises RuntimeError with what those that failed said."""
    failed = []
    try:
        for one in started:
            if one.process.wait(timeout=LIMIT_S):
                one.said.seek(0)
                said = one.said.read().decode(errors="replace")
                failed.append(f"{one.process.args} ended with {one.process.returncode}:\n{said}")
    finally:
        for one in started:
            one.process.terminate()
            one.said.close()
    if failed:
        raise RuntimeError("\n".join(failed))


def pipeplan(*arguments: object) -> None:
    """The command line, as a user types it."""
    wait([start((sys.executable, "-m", "pipeplan", *map(str, arguments)), {})])


@dataclass(frozen=True)
class Ours:
    """A plan, as `pipeplan solve` writes it and launch.sh runs it."""

    subject: str
    minibatch: int
    schedule: str
    accumulate: int = 1
    cuts: tuple[str, ...] | None = None
    """First children of the stages after the first; none for a single stage, None to let `solve` choose."""

    @property
    def name(self) -> str:
        """As the table has it."""
        many = f", M = {self.accumulate}" if self.accumulate > 1 else f", minibatch {self.minibatch}"
        return f"pipeplan {self.schedule if self.cuts != () else 'single stage'}{many}"

    @property
    def group(self) -> int:
        """Minibatches of one update."""
        return SUBJECTS[self.subject].batch // self.minibatch

    def prepare(self, folder: Path, cluster: str, repeats: int) -> Path:
        """Profile and solve; returns the plan folder."""
        profile, plan = folder / f"{self.subject}-{self.minibatch}.json", folder / self.name.replace(" ", "-")
        if not profile.exists():
            job = f"{JOBS}:{self.subject}"
            pipeplan("profile", job, "--microbatch", self.minibatch, "--repeats", repeats, "-o", profile)
        limits: list[object] = ["--workers", WORKERS] if cluster == "local" else []
        limits += ["--microbatch", self.minibatch]
        if self.accumulate > 1:
            limits += ["--batch", self.minibatch * self.accumulate]
        if self.cuts is not None:
            limits += ["--stages", len(self.cuts) + 1, "--no-recompute"]
        for stage, layer in pins(self.subject, profile, self.cuts or ()):
            limits += ["--pin", f"{layer}={stage}"]
        pipeplan("solve", profile, "--cluster", cluster, "--schedule", self.schedule, *limits, "-o", plan)
        return plan

    def run(self, ground: Ground, plan: Path, run_dir: Path, updates: int) -> Measured:
        """Train for so many updates."""
        count = updates * self.group
        options = ("--epochs", "1", "--max-minibatches", str(count), "--log-every", "0", "--run-dir", str(run_dir))
        ground.run(("bash", str(plan / "launch.sh"), *options))
        return read_run(plan, run_dir, self.group)


def pins(subject: str, profile: Path, cuts: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(stage from 1, layer) on both sides of every cut."""
    layers = [layer["name"] for layer in json.loads(profile.read_text())["layers"]]
    for stage, child in enumerate(cuts, 1):
        first = next(index for index, layer in enumerate(layers) if layer.split(".")[0] == child)
        yield stage, layers[first - 1]
        yield stage + 1, layers[first]


def read_run(plan: Path, run_dir: Path, group: int) -> Measured:
    """What a run folder says: times of its last worker, losses of those that have one.

    The memory of a worker without a model, which the summary counts, is left out, as it is on the other side.
    """
    empty = load_plan(plan).predictions[0].worker_bytes or 0.0
    losses: dict[int, list[float]] = {}
    ends: dict[int, float] = {}
    for path in sorted((run_dir / "metrics").glob("rank-*.jsonl"), key=lambda path: int(path.stem.split("-")[1])):
        ends = {}
        for line in map(json.loads, path.read_text().splitlines()):
            update = line["minibatch"] // group
            ends[update] = line["time_s"]
            if line["loss"] is not None:
                losses.setdefault(update, []).append(line["loss"])
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    memory = [stage["memory_bytes"]["measured"] - empty for stage in summary["stages"] for _ in stage["workers"]]
    means = [sum(seen) / len(seen) for _, seen in sorted(losses.items())]
    return Measured(tuple(ends.values()), tuple(means), tuple(memory))


@dataclass(frozen=True)
class Peers:
    """Contenders of the other side, which one pair of processes runs in turn."""

    subject: str
    contenders: tuple[str, ...]
    """As in 1f1b:4."""
    keep_memory: bool = False
    """Whether the C library keeps what is freed, as in our workers; by default it does not."""

    def run(self, ground: Ground, result: Path, updates: int) -> dict[str, Measured]:
        """Every contender, for so many updates, by its name; `+` ends that of one which keeps memory."""
        options = ["--subject", self.subject, "--contenders", ",".join(self.contenders), "--write", str(result)]
        if self.keep_memory:
            options.append("--keep-memory")
        ground.run((*torchrun(ground, WORKERS), peers_torch.__file__, *options, "--updates", str(updates)))
        return {
            name + "+" * self.keep_memory: Measured(*(tuple(found[key]) for key in ("ends", "losses", "memory_bytes")))
            for name, found in json.loads(result.read_text()).items()
        }

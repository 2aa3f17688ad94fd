"""From the loss of a server to training again, part by part: two servers of two workers on loopback, one is killed.

    python tests/benchmarks/replan.py [--model mnist] [--lost 1] [--runs 3] [--folder F]

Profiles a bundled model, solves for two servers, and starts launch.sh of each. When a checkpoint is there, everything
of one server is killed with SIGKILL. From then on the seconds count: the workers of the other one notice, what is left
of the run is stopped, `pipeplan replan --lost server1` plans for what is left, and its command is run until a worker of
the last stage has finished a minibatch. Nothing is waited for between the parts: people and monitors that act on a loss
take longer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

PIPEPLAN = [sys.executable, "-m", "pipeplan"]
AIM_S = 60.0
PATIENCE_S = 120.0
"""For anything that has to come: beyond that something is wrong."""
AGAIN_S = 2.0
"""A request to stop is repeated after so long: who waits for a server that is gone does not hear the first."""
EPOCHS = 1_000_000
"""More than will be run."""
BEFORE = "plan/runs/before"
EVERY = 20
"""Minibatches between checkpoints."""
CLUSTER = """
format = "pipeplan-cluster"
version = 1
name = "loopback"
[device]
name = "process"
kind = "cpu"
memory = "2 GiB"
[[level]]
name = "server"
count = 2
bandwidth = "1 GB/s"
source = "assumed"
[[level]]
name = "cluster"
count = 2
bandwidth = "10 Gbit/s"
source = "assumed"
"""

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """One loss. Times are seconds."""

    before: str
    """The plan, as in 2-1-1."""
    after: str
    pace: float
    """Predicted samples per second, now over before."""
    notice_s: float
    """From the kill until a worker of the other server has given up."""
    stop_s: float
    """From then until nothing of the old run is left."""
    stopped_by: str
    replan_s: float
    launch_s: float
    """Until the first minibatch after is finished."""
    killed_at: tuple[int, int]
    """(epoch, minibatch) of the last one that is known to be finished before."""
    resumed_at: tuple[int, int]
    """Of the first one after."""
    due: tuple[int, int]
    """Of the first one that the checkpoint leaves to do."""

    @property
    def total_s(self) -> float:
        """From the kill to the first minibatch after it."""
        return self.notice_s + self.stop_s + self.replan_s + self.launch_s


def measure(
    folder: Path,
    model: str,
    lost: int = 1,
    every: int = EVERY,
    checkpoints: int = 1,
    lost_too: Callable[[list[Path]], None] = lambda found: None,
) -> Measured:
    """Train in `folder`, lose server 0 or 1 once there are so many checkpoints, and go on. All that was started is gone
    at the end. `lost_too` may take from the checkpoints that the old run left, the earliest first.
    """
    _plan(folder, model)
    with _servers(folder, every) as servers:
        run = folder / BEFORE
        _wait(lambda: len(_checkpoints(run)) >= checkpoints or None, "checkpoints", servers)
        other = servers[1 - lost]
        workers = set(descendants(other.pid))
        began = time.time()
        kill(servers[lost])
        _wait(lambda: workers - set(descendants(other.pid)) or None, "the other server's workers to notice", [])
        noticed = time.time()
        stopped_by = _stop(other)
    lost_too(_checkpoints(run))
    stopped = time.time()
    report = _replan(folder, lost)
    planned = time.time()
    (command,) = report["commands"]
    environment = os.environ | command["environment"]
    with _started([[*command["arguments"], *_options(every)]], folder, [environment]) as again:
        first = _wait(lambda: _first_of_last_stage(folder / "plan-replanned"), "a minibatch", again)
        _stop(again[0])
    return Measured(
        before=report["before"]["config"],
        after=report["now"]["config"],
        pace=report["pace"],
        notice_s=noticed - began,
        stop_s=stopped - noticed,
        stopped_by=stopped_by,
        replan_s=planned - stopped,
        launch_s=first["time_s"] - planned,
        killed_at=position(lines(run)[-1]),
        resumed_at=position(first),
        due=_due(report["checkpoint"]),
    )


def _plan(folder: Path, model: str) -> None:
    (folder / "loopback.toml").write_text(CLUSTER)
    _pipeplan(folder, "profile", model, "--repeats", "5")
    _pipeplan(folder, "solve", "profile.json", "--cluster", "loopback.toml")
    stages = json.loads((folder / "plan/plan.json").read_text())["plan"]["stages"]
    if len({worker // 2 for stage in stages for worker in stage["workers"]}) < 2:
        raise SystemExit("the best plan leaves a server idle: little would be lost; choose another --model")


def _replan(folder: Path, lost: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_pipeplan(folder, "replan", "plan", "--lost", f"server{lost}", "--json"))
    return found


def _pipeplan(folder: Path, *arguments: str) -> str:
    done = subprocess.run([*PIPEPLAN, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"pipeplan {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def _options(every: int) -> list[str]:
    return ["--epochs", str(EPOCHS), "--checkpoint-minibatches", str(every), "--log-every", "0"]


@contextmanager
def _servers(folder: Path, every: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """launch.sh of both servers, as on two machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "PIPEPLAN_SECRET": "the same on all servers",
    }
    # One folder for both, whenever each of them starts.
    command = ["plan/launch.sh", *_options(every), "--run-dir", BEFORE]
    environments = [os.environ | shared | {"NODE_RANK": str(node)} for node in (0, 1)]
    with _started([command, command], folder, environments) as servers:
        yield servers


@contextmanager
def _started(
    commands: list[list[str]], folder: Path, environments: list[dict[str, str]]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that write to server-N.log in `folder`, killed at the end with all that they started."""
    started = []
    try:
        for number, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            with (folder / f"server-{number}.log").open("ab") as log:
                started.append(
                    subprocess.Popen(
                        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                )
        yield started
    finally:
        for process in started:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with all that it started, at once."""
    for pid in [process.pid, *descendants(process.pid)] if process.poll() is None else []:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def descendants(pid: int) -> list[int]:
    """All processes that one started, and those that they started."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended since
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def _stop(server: subprocess.Popen[bytes]) -> str:
    """Ask for an end until there is one; returns what it took."""
    asked = 0
    deadline = time.monotonic() + PATIENCE_S
    while server.poll() is None and time.monotonic() < deadline:
        server.send_signal(signal.SIGTERM)
        asked += 1
        try:
            server.wait(AGAIN_S)
        except subprocess.TimeoutExpired:
            continue
    if server.poll() is None:
        kill(server)
        return "SIGKILL"
    return f"SIGTERM, {asked} times" if asked > 1 else "SIGTERM"


def _wait(what: Callable[[], T | None], name: str, running: list[subprocess.Popen[bytes]]) -> T:
    deadline = time.monotonic() + PATIENCE_S
    while (found := what()) is None:
        ended = [process.returncode for process in running if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise SystemExit(f"waiting for {name} in vain: processes ended with {ended}")
        time.sleep(0.02)
    return found


def _checkpoints(run: Path) -> list[Path]:
    """The manifests of those that are complete."""
    return sorted(run.glob("checkpoints/*/manifest.json"))


def _first_of_last_stage(plan: Path) -> dict[str, Any] | None:
    """The first minibatch that a worker of the last stage has finished and written down."""
    written = [line for run in plan.glob("runs/*") for line in lines(run)]
    return written[0] if written else None


def lines(run: Path) -> list[dict[str, Any]]:
    """What workers of the last stage have written down of their minibatches, which alone have a loss, by time."""
    found = []
    for path in run.glob("metrics/rank-*.jsonl"):
        for text in path.read_text(encoding="utf-8").split("\n")[:-1]:  # behind the last line break: half a line
            line = json.loads(text)
            if line["loss"] is not None:
                found.append(line)
    return sorted(found, key=lambda line: float(line["time_s"]))


def position(line: dict[str, Any]) -> tuple[int, int]:
    """(epoch, minibatch), both from 0."""
    return int(line["epoch"]), int(line["minibatch"])


def _due(checkpoint: dict[str, Any]) -> tuple[int, int]:
    epoch, done = checkpoint["epoch"], checkpoint["minibatch"]
    return (epoch + 1, 0) if done == checkpoint["minibatches"] else (epoch, done)


def _show(found: list[Measured], console: Console) -> None:
    table = Table("part", "median s", "least s", "most s")
    for name, seconds in (
        ("the other server's workers notice", [one.notice_s for one in found]),
        ("what is left of the old run stops", [one.stop_s for one in found]),
        ("pipeplan replan", [one.replan_s for one in found]),
        ("launch, to the first minibatch", [one.launch_s for one in found]),
        (f"in all (aim: {AIM_S:g})", [one.total_s for one in found]),
    ):
        table.add_row(name, *(f"{value:.1f}" for value in (statistics.median(seconds), min(seconds), max(seconds))))
    console.print(table)
    for one in found:
        (due_epoch, due), (lost_epoch, lost), (first_epoch, first) = one.due, one.killed_at, one.resumed_at
        console.print(
            f"{one.before} on two servers, then {one.after} on one (predicted: {one.pace:.0%} of the pace); stopped by "
            f"{one.stopped_by}. Minibatches, by epoch: written down before the loss {lost_epoch}/{lost}, first that "
            f"the checkpoint leaves {due_epoch}/{due}, first after {first_epoch}/{first}."
        )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mnist")
    parser.add_argument("--lost", type=int, choices=(0, 1), default=1, help="server  [default: 1]")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="a folder to keep  [default: a temporary one]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        top = (given.folder or Path(temporary)).resolve()
        found = []
        for number in range(given.runs):
            folder = top / f"run-{number}"
            folder.mkdir(parents=True)
            found.append(measure(folder, given.model, given.lost))
    _show(found, Console())


if __name__ == "__main__":
    main()

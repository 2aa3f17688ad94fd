"""launch.sh, rendered for the plan of a test, jobs for it to train, and a launch that runs in the background."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from types import TracebackType
from typing import Any, Self

from toy_workers import stage_contents, write_plan

from pipeplan.rendering.templates import load_template


def render(folder: Path, **variables: Any) -> Path:
    """Render launch.sh of a made-up plan into the folder of its stage files."""
    values = {"title": "a plan", "servers": 1, "workers_per_server": 2, "device": "cpu", "python": sys.executable}
    values |= {
        "server_sizes": (),
        "server_list": (),
        "idle_servers": 0,
        "uneven": False,
        "threads": 1,
        "version": "0",
        "command": "a test",
        "updates": "",
        "folder": "",
    }
    script = folder / "launch.sh"
    script.write_text(load_template("launch.sh.j2").render(values | variables))
    script.chmod(0o755)
    return script


LAYERS = {1: [["0", "1", "2", "loss"]], 2: [["0", "1"], ["2", "loss"]], 3: [["0"], ["1"], ["2", "loss"]]}
"""Of the jobs below, by the number of stages."""


def script_of(folder: Path, job: str, replicas: Sequence[int] = (1, 1), **changed: Any) -> Path:
    """launch.sh of a plan for a job, in a folder that has both; `changed` replaces fields of the stage files."""
    (folder / "job.py").write_text(job)
    contents = stage_contents(replicas, minibatch=4, mode=changed.get("mode", "training"))
    for content, layers in zip(contents, LAYERS[len(replicas)], strict=True):
        content |= {"model": {"ref": f"{folder / 'job.py'}:job", "graph_hash": None}, "layers": layers} | changed
    servers, each = changed.get("servers", 1), changed.get("workers_per_server", sum(replicas))
    return render(write_plan(folder / "plan", contents), servers=servers, workers_per_server=each)


JOB = """
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
from pipeplan_launch import Data, Job

def job():
    data = TensorDataset(torch.randn(12, 4), torch.randint(3, (12,)))
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return Job(net, loss=functional.cross_entropy, data=lambda: Data(data, data))
"""


SLOW_JOB = """
import time
import torch
from torch.nn import functional
from torch.utils.data import Dataset
from pipeplan_launch import Data, Job

class Slow(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), index % 3

def job():
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    return Job(net, loss=functional.cross_entropy, data=lambda: Data(Slow()), optimizer=optimizer)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""


PATIENCE_S = 120.0
"""For whatever a loaded machine takes."""


class Launch:
    """`with Launch(script, run, …) as launch:`; ends with every process of it dead."""

    def __init__(self, script: Path, run: Path, *options: str, **environment: str) -> None:
        self.run = run
        self.lines: list[str] = []
        """Of stderr, so far."""
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "OMP_NUM_THREADS")}
        self.process = subprocess.Popen(
            [script, "--run-dir", str(run), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=clean | {"TMPDIR": str(run.parent)} | environment,
        )
        self._seen: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, SIGKILL)

    def workers(self) -> dict[int, int]:
        """rank -> process id, of those that run now."""
        found = {}
        for pid, rank, port in _workers(self.process.pid):
            found[rank] = pid
            self._seen[pid] = port
        return found

    def alive(self) -> list[int]:
        """The workers ever seen that are still there."""
        return [pid for pid in self._seen if _is_alive(pid)]

    def started(self) -> list[int]:
        """The processes that the launcher has started and that run, whatever has become of it."""
        mark = f"PIPEPLAN_LAUNCHER={self.process.pid}"
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_text(errors="replace").split("\0") and _is_alive(int(folder.name)):
                    found.append(int(folder.name))
        return found

    def port(self) -> int:
        """Where the workers' common store was."""
        return next(reversed(self._seen.values()))

    def listening(self) -> list[str]:
        """Addresses on which the launcher and its workers listen now, in the hexadecimal form of /proc/net/tcp."""
        pids = [self.process.pid, *self.workers().values()]
        return sorted(address for pid in pids for address in _listening(pid))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, as long as the launch runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}: {self.lines}"
            assert time.monotonic() < deadline, f"no {what}: {self.lines}"
            time.sleep(0.005)

    def wait(self) -> int:
        """The status."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return status

    def said(self, text: str) -> bool:
        """Whether a line on stderr holds this."""
        return any(text in line for line in list(self.lines))

    def latest_s(self) -> float:
        """When the last minibatch was finished at the last stage, in seconds since 1970; 0 if none was."""
        step = last_step(self.run)
        return 0.0 if step is None else float(step["time_s"])

    def trains(self) -> None:
        """Wait until minibatches are run from now on, and take note of the workers."""
        now = time.time()
        self.until(lambda: self.latest_s() > now, "minibatch")
        self.workers()

    def kill(self, rank: int, number: int = SIGKILL) -> None:
        """Send a worker a signal."""
        os.kill(self.workers()[rank], number)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))


def last_step(run: Path) -> dict[str, float] | None:
    """The last line of metrics of the worker with the highest rank that has one."""
    for path in sorted(run.glob("metrics/rank-*.jsonl"), reverse=True):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 10_000))
            *whole, _ = file.read().split(b"\n")
        for line in whole[-1:]:
            with suppress(ValueError):  # the only one may be cut off
                return dict(json.loads(line))
    return None


def curve(run: Path) -> dict[tuple[int, int], float]:
    """(epoch, minibatch) -> loss; raises if one is there twice."""
    found: dict[tuple[int, int], float] = {}
    for path in run.glob("metrics/rank-*.jsonl"):
        for line in path.read_text().splitlines():
            step = json.loads(line)
            if step["loss"] is not None:
                assert (step["epoch"], step["minibatch"]) not in found
                found[step["epoch"], step["minibatch"]] = step["loss"]
    return found


def free_port() -> int:
    """A port of the loopback interface where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether a server could listen there."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _workers(launcher: int) -> list[tuple[int, int, int]]:
    """(process id, rank, port of the store)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, KeyError, ValueError):
            state, parent, *_ = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(parent) == launcher and state not in "ZX":
                pairs = (entry.partition("=") for entry in (folder / "environ").read_text().split("\0"))
                environment = {name: value for name, _, value in pairs}
                found.append((int(folder.name), int(environment["RANK"]), int(environment["MASTER_PORT"])))
    return found


def _listening(pid: int) -> list[str]:
    """The addresses of the TCP sockets on which a process listens."""
    process = Path("/proc") / str(pid)
    sockets = {os.readlink(entry) for entry in (process / "fd").iterdir() if entry.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in (process / "net" / name).read_text().splitlines()[1:]]
    return [words[1].partition(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in sockets]


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    return False


def left_nothing(launch: Launch) -> bool:
    """No process, and no port that is still taken."""
    deadline = time.monotonic() + 20
    while (launch.alive() or not is_free(launch.port())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not launch.alive() and is_free(launch.port())

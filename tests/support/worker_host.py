"""Worker processes for tests, forked from a host process that has imported torch once.

A test process starts its host with its first workers, and the host ends with it. All tests of workers that do not need
`launch.sh` itself start them here: what a worker runs is a function of an importable module.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from repository import ROOT

HUNG_AFTER_S = 60.0
PRELOADED = (
    "torch._dynamo",
    "pipeplan_launch.worker",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
    "multiprocessing.synchronize",
)
"""What the host imports, so that no worker has to."""


@dataclass(frozen=True)
class Ended:
    """How a group of worker processes ended."""

    statuses: list[int]
    out: str
    err: str


@dataclass(frozen=True)
class _Request:
    """A group of workers to fork: each runs `target(*prepared, *arguments[rank])`."""

    number: int
    target: Callable[..., int | None]
    arguments: list[tuple[Any, ...]]
    environments: list[dict[str, str]]
    logs: list[str]
    prepare: tuple[Callable[..., Any], tuple[Any, ...]] | None
    unawaited: frozenset[int]
    hung_after_s: float


class WorkerGroup:
    """Workers that were started together and have not been waited for."""

    def __init__(self, host: _Host, request: _Request) -> None:
        self._host, self._request = host, request
        self.store: Any = None
        """Kept as long as the group, because its workers ask it."""

    def finish(self) -> Ended:
        """Wait for their end; fails where one hangs, after all of them were killed."""
        statuses = self._host.statuses(self._request)
        logs = [Path(log) for log in self._request.logs]
        out, err = ("".join(log.with_suffix(end).read_text() for log in logs) for end in (".out", ".err"))
        hung = [rank for rank, status in enumerate(statuses) if status is None]
        assert not hung, f"workers {hung} hang; {out}{err}"
        return Ended([status or 0 for status in statuses], out, err)


def start_workers(
    target: Callable[..., int | None],
    arguments: Sequence[tuple[Any, ...]],
    folder: Path,
    *,
    environments: Sequence[dict[str, str]] = (),
    prepare: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
    name: str = "worker",
    unawaited: Sequence[int] = (),
    hung_after_s: float = HUNG_AFTER_S,
) -> WorkerGroup:
    """Fork a process for each tuple of arguments; `target` returns its exit status, where None means 0.

    Output goes to `NAME-RANK.out` and `.err` in `folder`, the process id to `NAME-RANK.pid`. `prepare`, a function and
    its arguments, runs in the host beforehand, and its result is the first argument of every worker. The ranks in
    `unawaited` are killed once all others have ended.
    """
    world = len(arguments)
    logs = [str(folder / f"{name}-{rank}") for rank in range(world)]
    return _host().start(
        target,
        list(arguments),
        list(environments) or [{} for _ in range(world)],
        logs,
        prepare,
        frozenset(unawaited),
        hung_after_s,
    )


def start_attempt(
    target: Callable[..., int | None],
    arguments: Sequence[tuple[Any, ...]],
    folder: Path,
    *,
    store: Any = None,
    variables: Sequence[dict[str, str]] = (),
    **options: Any,
) -> WorkerGroup:
    """Start the workers of one attempt, as torchrun would. `store`: theirs, made for them by default.

    `variables` are added to the environment of each worker.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = store or TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = str(len(arguments))
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environments = [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **more}
        for rank, more in enumerate(variables or [{}] * len(arguments))
    ]
    group = start_workers(target, arguments, folder, environments=environments, **options)
    group.store = store
    return group


class _Host:
    """The host as its test process sees it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = f"import worker_host; worker_host.serve({theirs.fileno()})"
        path = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._requests = 0
        self._answers: dict[int, list[int | None] | str] = {}
        atexit.register(self.end)

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def start(self, *group: Any) -> WorkerGroup:
        self._requests += 1
        request = _Request(self._requests, *group)
        self._connection.send((request.number, pickle.dumps(request)))
        return WorkerGroup(self, request)

    def statuses(self, request: _Request) -> list[int | None]:
        """The exit statuses by rank, None for a worker that hung."""
        while request.number not in self._answers:  # a test that failed may have left the answer to its workers
            assert self._connection.poll(3 * HUNG_AFTER_S), "the process that forks workers hangs"
            number, answer = self._connection.recv()
            self._answers[number] = answer
        answer = self._answers.pop(request.number)
        assert not isinstance(answer, str), answer
        return answer


@cache
def _host() -> _Host:
    return _Host()


def host_cpu_s() -> float:
    """CPU seconds of the host of this process, and of all workers that have ended; 0 where it has not been started."""
    if not _host.cache_info().currsize:
        return 0.0
    stat = Path(f"/proc/{_host()._process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")


def serve(descriptor: int) -> None:
    """Be the host: fork workers as requests come, until the test process is gone."""
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    for module in PRELOADED:
        importlib.import_module(module)
    requests = Connection(descriptor)
    while True:
        try:
            number, pickled = requests.recv()
        except (EOFError, OSError):
            return
        requests.send((number, _answer(pickled, descriptor)))


def _answer(pickled: bytes, descriptor: int) -> list[int | None] | str:
    try:
        request: _Request = pickle.loads(pickled)
        prepared = () if request.prepare is None else (request.prepare[0](*request.prepare[1]),)
    except Exception:
        return traceback.format_exc()
    gc.collect()
    gc.freeze()  # what the fork shares need not be searched, nor copied, by every worker
    children = [_fork(request, rank, prepared, descriptor) for rank in range(len(request.arguments))]
    return _wait(children, request)


def _fork(request: _Request, rank: int, prepared: tuple[Any, ...], descriptor: int) -> int:
    child = os.fork()
    if child:
        return child
    status: int | None = 70
    try:
        os.close(descriptor)
        for number, end in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(request.logs[rank] + end, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        Path(request.logs[rank] + ".pid").write_text(str(os.getpid()))
        os.environ |= request.environments[rank]
        status = request.target(*prepared, *request.arguments[rank])
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


def _wait(children: Sequence[int], request: _Request) -> list[int | None]:
    """The exit statuses of child processes; one that takes too long is killed."""
    statuses: dict[int, int | None] = {}
    awaited = set(range(len(children))) - request.unawaited
    until = time.monotonic() + request.hung_after_s
    while awaited - statuses.keys():
        for rank in awaited - statuses.keys():
            ended, status = os.waitpid(children[rank], os.WNOHANG)
            if ended:
                statuses[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                _kill(children[rank])
                statuses[rank] = None
        time.sleep(0.002)
    for rank in request.unawaited:
        statuses[rank] = _kill(children[rank])
    return [statuses[rank] for rank in range(len(children))]


def _kill(child: int) -> int:
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

"""Attempts of one launch, one after another, in processes forked as `toy_workers` does: what torchrun does, faster.

The workers of all attempts share one store, and a folder that stands for the launcher's.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import toy_workers
from preloaded import PRELOADED
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from toy_workers import Ended, Toy

from pipeplan_launch.elastic import restart_state
from pipeplan_launch.rank_mapping.host_identity import SERVER_VARIABLE


def run_attempts(
    folder: Path,
    arguments: Sequence[str],
    toys: Sequence[Toy],
    world: int,
    cut_off: tuple[int, int] | None = None,
    servers: Sequence[Sequence[str]] = (),
) -> list[Ended]:
    """One attempt for each toy, each with all workers of the plan in `folder`.

    `cut_off`: (rank, at which call of its stage) in the first attempt all connections of that worker are cut.
    `servers`: for each attempt, the name of the server that each process is on, if not all are on this machine.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = folder / "launcher"
    shutil.rmtree(launcher, ignore_errors=True)
    launcher.mkdir()
    ended = []
    for attempt, toy in enumerate(toys):
        environment = {
            restart_state.VARIABLE: str(launcher),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(len(toys) - 1),
        }
        logs = [folder / f"attempt-{attempt}-worker-{rank}" for rank in range(world)]
        processes = [
            context.Process(
                target=_worker,
                args=(
                    environment
                    | ({SERVER_VARIABLE: servers[attempt][rank], "GLOO_SOCKET_IFNAME": "lo"} if servers else {}),
                    _cut(cut_off, attempt, rank),
                    rank,
                    world,
                    store.port,
                    [str(folder), *arguments],
                    toy,
                    str(log),
                ),
                daemon=True,
            )
            for rank, log in enumerate(logs)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        out, err = ("".join(log.with_suffix(end).read_text() for log in logs) for end in (".out", ".err"))
        assert not hung, f"workers {hung} of attempt {attempt} hang; {err}"
        ended.append(Ended([process.exitcode or 0 for process in processes], out, err))
    return ended


def _cut(cut_off: tuple[int, int] | None, attempt: int, rank: int) -> int | None:
    return cut_off[1] if cut_off is not None and attempt == 0 and cut_off[0] == rank else None


def _worker(environment: dict[str, str], cut_at: int | None, *arguments: object) -> None:
    os.environ |= environment
    inner, calls = toy_workers.ToyStage.call, itertools.count()

    def call(*given: Any) -> Any:
        if next(calls) == cut_at:
            _cut_connections()
        return inner(*given)

    toy_workers.ToyStage.call = call  # type: ignore[method-assign]
    toy_workers._worker(*arguments)  # type: ignore[arg-type]


def _cut_connections() -> None:
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            connection.getpeername()  # OSError for one that listens
            connection.shutdown(socket.SHUT_RDWR)

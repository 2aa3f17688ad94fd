"""Attempts of one launch, one after another, by the workers of the toy: what torchrun does, faster.

The workers of all attempts share one store, and a folder that stands for the launcher's.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import toy_workers
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from toy_workers import Toy
from worker_host import Ended, launch_environment, run_workers

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
        apart = [
            {SERVER_VARIABLE: server, "GLOO_SOCKET_IFNAME": "lo"} for server in (servers[attempt] if servers else [])
        ]
        ended.append(
            run_workers(
                _worker,
                [(_cut(cut_off, attempt, rank), rank, [str(folder), *arguments], toy) for rank in range(world)],
                folder,
                environments=[
                    launch_environment(rank, world, store.port) | environment | (apart[rank] if apart else {})
                    for rank in range(world)
                ],
                name=f"attempt-{attempt}-worker",
            )
        )
    return ended


def _cut(cut_off: tuple[int, int] | None, attempt: int, rank: int) -> int | None:
    return cut_off[1] if cut_off is not None and attempt == 0 and cut_off[0] == rank else None


def _worker(cut_at: int | None, rank: int, arguments: list[str], toy: Toy) -> int:
    inner, calls = toy_workers.ToyStage.call, itertools.count()

    def call(*given: Any) -> Any:
        if next(calls) == cut_at:
            _cut_connections()
        return inner(*given)

    toy_workers.ToyStage.call = call  # type: ignore[method-assign]
    return toy_workers.toy_worker(rank, arguments, toy)


def _cut_connections() -> None:
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            connection.getpeername()  # OSError for one that listens
            connection.shutdown(socket.SHUT_RDWR)

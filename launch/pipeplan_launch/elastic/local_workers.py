"""Forks workers that share a machine, and keeps their sockets on the loopback interface. Torch-free.

Environment variables tell Gloo and NCCL on which interface to listen; without them the host name decides. Workers of
one machine need no network, so variables that the user exported for other runs are replaced.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

LOOPBACK = "127.0.0.1"
_INTERFACE = "lo"
_ON_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": _INTERFACE,
    "NCCL_SOCKET_IFNAME": f"={_INTERFACE}",  # "=", because NCCL treats a plain name as a prefix
    "TP_SOCKET_IFNAME": _INTERFACE,
}
_ELSEWHERE = ("NCCL_COMM_ID", "NCCL_RAS_ADDR")
"""Variables with an address at which NCCL listens, even if another interface is chosen."""


def stay_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Make Gloo and NCCL listen on the loopback interface only. Call this before a process group is made.

    Does nothing on systems whose loopback interface has another name than Linux's.
    """
    if Path("/sys/class/net", _INTERFACE).exists():
        environment.update(_ON_LOOPBACK)
        for name in _ELSEWHERE:
            environment.pop(name, None)


def is_local_name(address: str) -> bool:
    """Whether an address always means the machine itself, such as localhost."""
    return address == "localhost" or address.startswith("127.") or address == "::1"


def on_one_machine(environment: Mapping[str, str]) -> bool:
    """Whether all workers of a run are on this machine, according to torchrun's variables."""
    world = environment.get("WORLD_SIZE")
    alone = world is not None and world in ("1", environment.get("LOCAL_WORLD_SIZE"))
    return alone or is_local_name(environment.get("MASTER_ADDR", ""))


def worker_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """torchrun's variables for a worker of one machine. `port`: where the process that starts it serves the store."""
    ranks = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    variables = {name: str(value) for name, value in ranks.items()}
    return variables | {"MASTER_ADDR": LOOPBACK, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def fork_worker(work: Callable[[], object], variables: Mapping[str, object]) -> int:
    """Call `work` in a forked process with these environment variables; returns the process id.

    The process exits with the status of a `SystemExit`, with 0 if `work` returns, and with 1 after other exceptions.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    status = 1
    try:  # the process never returns, so that nothing of the parent is cleaned up twice
        keep_inherited_objects()
        os.environ |= {name: str(value) for name, value in variables.items()}
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def keep_inherited_objects() -> None:
    """In a forked process: never collect objects of the parent process.

    Destroying a store or a process group waits for its threads, which the forked process does not have.
    """
    gc.freeze()

"""torch's key-value store on the loopback interface only.

A `TCPStore` that opens its own socket listens on all addresses. Here it gets a socket that listens already.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.rendezvous import rendezvous

from pipeplan_launch.elastic.local_workers import LOOPBACK, on_one_machine
from pipeplan_launch.elastic.store_gateway import loopback_listener

DEFAULT_TIMEOUT = timedelta(seconds=60)


def serve_store(timeout: timedelta = DEFAULT_TIMEOUT, port: int = 0) -> Any:
    """Serve a store for the workers of this machine, as long as the returned object exists.

    Raises `OSError` if the port is not free. 0: any port; the attribute `port` of the store has its number.
    """
    return open_store(port, timeout, loopback_listener(port).detach())


def open_store(port: int, timeout: timedelta = DEFAULT_TIMEOUT, listen_fd: int | None = None) -> Any:
    """The store at a port of the loopback interface.

    `listen_fd`: descriptor of the socket that listens there, if this process is to serve the store.
    """
    return TCPStore(
        LOOPBACK,
        port,
        is_master=listen_fd is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def environment_store(timeout: timedelta) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT of torchrun's environment.

    torchrun serves it, or else worker 0. Where all workers are on one machine, worker 0 serves it on the loopback
    interface. Raises what torch raises, and `OSError` if the port is not free.
    """
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if served or not on_one_machine(os.environ):
        return next(rendezvous("env://", timeout=timeout))[0]
    port = int(os.environ["MASTER_PORT"])
    return serve_store(timeout, port) if os.environ["RANK"] == "0" else open_store(port, timeout)


# torchrun's rendezvous with a store that listens on the loopback interface only, and that unpickles nothing.
#
# torchrun's own rendezvous listen on all addresses, and `c10d`, which `torchrun --standalone` uses, unpickles its
# state from the store. Here the launcher opens the store's socket and hands it to torch; other servers reach it
# through `store_gateway`. The servers of a run and their numbers are known from the start, so there is nothing to
# agree on.

BACKEND = "pipeplan"
"""Name of this rendezvous among torchrun's."""


def rendezvous_options(port: int, server: int, timeout_s: float, listen_fd: int | None) -> list[str]:
    """Options with which torchrun takes the store at a port of the loopback interface.

    `listen_fd`: descriptor of the socket that listens there, if this process is to serve the store. `timeout_s`: how
    long torchrun waits for other servers.
    """
    rendezvous_handler_registry.register(BACKEND, _create_handler)
    settings = [f"rank={server}", f"timeout={timeout_s}", *([] if listen_fd is None else [f"listen_fd={listen_fd}"])]
    return [f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={LOOPBACK}:{port}", f"--rdzv-conf={','.join(settings)}"]


def _create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(
        int(parameters.endpoint.rpartition(":")[2]),
        int(parameters.get("rank")),
        parameters.max_nodes,
        parameters.run_id,
        timedelta(seconds=float(parameters.get("timeout"))),
        parameters.get_as_int("listen_fd"),
    )


class LoopbackRendezvous(RendezvousHandler):
    """Servers that are known from the start, and a store on a port of the loopback interface."""

    def __init__(
        self, port: int, rank: int, servers: int, run_id: str, timeout: timedelta, listen_fd: int | None
    ) -> None:
        """`listen_fd`: descriptor of the socket that listens on the port, where this process has the store."""
        self._port, self._rank, self._servers, self._run_id = port, rank, servers, run_id
        self._timeout, self._listen_fd = timeout, listen_fd
        self._store: Any = None

    def get_backend(self) -> str:
        """The name of this rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: workers use the launcher's store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, and this server's number. All attempts have the same."""
        if self._store is None:
            self._store = open_store(self._port, self._timeout, self._listen_fd)
        place = RendezvousStoreInfo(LOOPBACK, self._port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), self._rank, self._servers, place)

    def is_closed(self) -> bool:
        """False: the servers remain the same."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: no server can join."""

    def num_nodes_waiting(self) -> int:
        """0: no server can join."""
        return 0

    def get_run_id(self) -> str:
        """torchrun's name for the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with the launcher."""
        return True

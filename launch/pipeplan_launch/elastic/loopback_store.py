"""torch's key-value store on the loopback interface only.

A `TCPStore` that opens its own socket listens on all addresses. Here it gets a socket that listens already.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
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

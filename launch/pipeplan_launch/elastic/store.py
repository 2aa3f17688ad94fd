"""The workers' common store: torch's key-value store on the loopback interface only, and a client with a timeout.

A `TCPStore` that opens its own socket listens on all addresses. Here it gets a socket that already listens.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.rendezvous import rendezvous

from pipeplan_launch.elastic.local_workers import LOOPBACK, on_one_machine
from pipeplan_launch.elastic.store_gateway import loopback_listener

T = TypeVar("T")
DEFAULT_TIMEOUT = timedelta(seconds=60)


def serve_store(timeout: timedelta = DEFAULT_TIMEOUT, port: int = 0) -> Any:
    """Serve a store for the workers of this machine, as long as the returned object exists.

    `port`: 0 for any port; the attribute `port` of the store has its number. Raises `OSError` if the port is not free.
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

    torchrun serves the store, or else worker 0. If all workers are on one machine, worker 0 serves it on the loopback
    interface. Raises the errors of torch, and `OSError` if the port is not free.
    """
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if served or not on_one_machine(os.environ):
        return next(rendezvous("env://", timeout=timeout))[0]
    port = int(os.environ["MASTER_PORT"])
    return serve_store(timeout, port) if os.environ["RANK"] == "0" else open_store(port, timeout)


# A rendezvous for torchrun whose store listens on the loopback interface only, and which unpickles nothing.
#
# torchrun's own rendezvous listen on all addresses, and `c10d`, which `torchrun --standalone` uses, unpickles its
# state from the store. Here the launcher opens the store's socket and hands it to torch; other servers reach it
# through `store_gateway`. The servers of a run and their numbers are known from the start, so there is nothing to
# agree on.

BACKEND = "pipeplan"
"""Name of this rendezvous for torchrun."""


def rendezvous_options(port: int, server: int, timeout_s: float, listen_fd: int | None) -> list[str]:
    """Options that make torchrun use the store at a port of the loopback interface.

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
        float(parameters.get("timeout")),
        parameters.get_as_int("listen_fd"),
    )


class LoopbackRendezvous(StaticTCPRendezvous):
    """A rendezvous of servers that are known from the start, with a store on a port of the loopback interface."""

    def __init__(
        self, port: int, rank: int, servers: int, run_id: str, timeout_s: float, listen_fd: int | None
    ) -> None:
        """`listen_fd`: descriptor of the socket that listens on the port; None if another process serves the store."""
        super().__init__(LOOPBACK, port, rank, servers, run_id, math.ceil(timeout_s))
        self._listen_fd = listen_fd
        self._opened: Any = None

    def get_backend(self) -> str:
        """The name of this rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: workers use the launcher's store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, and this server's number. They are the same in all attempts."""
        if self._opened is None:
            self._opened = open_store(self.master_port, self.timeout, self._listen_fd)
        place = RendezvousStoreInfo(LOOPBACK, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, self._opened), self.rank, self.world_size, place)


# A client of the workers' common store with a timeout.
#
# If the connection to the store is cut, torch waits for an answer for as long as TCP tries to deliver the request,
# which is a quarter of an hour on Linux. Operations of this client end earlier.


class StoreTimeout(RuntimeError):
    """The store has not answered in time. It may answer again once the connection is back."""


class StoreClient:
    """torch's key-value store. Operations raise `RuntimeError` if they fail and `StoreTimeout` if they take too
    long.
    """

    def __init__(self, store: Any, patience_s: float) -> None:
        """`patience_s`: how long the store may be silent, counted from its first unanswered request."""
        self._store, self._prefix = store, ""
        self._requests = _RequestThread(patience_s)

    def under(self, prefix: str) -> StoreClient:
        """A client of this store that prefixes all keys, compatible with torch's `PrefixStore`."""
        other = StoreClient.__new__(StoreClient)
        other._store, other._requests = self._store, self._requests
        other._prefix = f"{self._prefix}{prefix}/"
        return other

    def set(self, key: str, value: str, /) -> None:
        """Set the value of a key."""
        self._requests.call(lambda: self._store.set(self._prefix + key, value))

    def get(self, key: str, /) -> bytes:
        """The value of a key that is set."""
        value: bytes = self._requests.call(lambda: self._store.get(self._prefix + key))
        return value

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are set."""
        return bool(self._requests.call(lambda: self._store.check([self._prefix + key for key in keys])))

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number that starts at 0; returns the sum."""
        return int(self._requests.call(lambda: self._store.add(self._prefix + key, amount)))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value if the present value is `expected`, where "" means none. Returns the value afterwards."""
        value: bytes = self._requests.call(lambda: self._store.compare_set(self._prefix + key, expected, desired))
        return value


class _RequestThread:
    """A thread that executes one request after another.

    The timeout is for the whole queue, not for each request. Otherwise every request to a silent store would wait for
    the whole timeout again, and a worker that is cut off makes several requests before it ends.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._thread = ThreadPoolExecutor(1, "store")
        self._lock = threading.Lock()
        self._open = 0
        """Number of unanswered requests."""
        self._silent_since = 0.0

    def call(self, operation: Callable[[], T]) -> T:
        """The operation's result. Raises what the operation raises, or `StoreTimeout`."""
        with self._lock:
            if not self._open:
                self._silent_since = time.monotonic()
            self._open += 1
        request = self._thread.submit(operation)
        request.add_done_callback(self._end)
        while (left_s := self._silent_since + self._patience_s - time.monotonic()) > 0:
            wait([request], left_s)
            if request.done():
                return request.result()
        request.cancel()
        raise StoreTimeout(f"it did not answer within {self._patience_s:g} s")

    def _end(self, request: Future[Any]) -> None:
        with self._lock:
            self._open -= 1
            if not request.cancelled():
                self._silent_since = time.monotonic()

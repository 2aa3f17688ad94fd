"""This launcher's part in a launch on several servers: the gateway of server 0, or the connection to it. Torch-free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pipeplan_launch.elastic import handshake
from pipeplan_launch.elastic.handshake import HandshakeFailed, Purpose
from pipeplan_launch.elastic.store_gateway import StoreGateway, StoreRelay, loopback_listener
from pipeplan_launch.errors import LaunchError, listed, print_status

NOTE_S = 10.0
"""Seconds after which a line says what this server is waiting for."""
RETRY_S = 0.2
_PLACE_OPTIONS = ("--nnodes", "--node-rank", "--master-addr", "--master-port")


@dataclass(frozen=True)
class ServerPlace:
    """The number of this launcher's server, the number of servers, and the address of server 0."""

    server: int
    servers: int
    address: str = ""
    port: int = 0

    @classmethod
    def of(cls, options: Mapping[str, str]) -> ServerPlace:
        """Read from the options that launch.sh gives torchrun. Raises `LaunchError` if some are missing."""
        if "--standalone" in options or options.get("--nnodes", "1") == "1":
            return cls(0, 1)
        names = ("--nnodes", "--node-rank", "--master-port")
        numbers = [options.get(name, "") for name in names]
        if "--master-addr" not in options or not all(number.isdecimal() for number in numbers):
            raise LaunchError(f"several servers need {listed(_PLACE_OPTIONS)}, and one server needs none of them")
        servers, server, port = map(int, numbers)
        return cls(server, servers, options["--master-addr"], port)


@dataclass(frozen=True)
class StoreAccess:
    """The access of this server's launcher and workers to the store, on the loopback interface."""

    place: ServerPlace
    port: int
    listen_fd: int | None = None
    """Descriptor of the socket on which this process serves the store; None if another server serves it."""
    gateway: StoreGateway | None = None
    relay: StoreRelay | None = None

    def missing(self) -> str:
        """The servers that have not joined, as text."""
        joined = self.gateway.joined() if self.gateway is not None else set()
        missing = [number for number in range(1, self.place.servers) if number not in joined]
        return f"server{'s' if len(missing) > 1 else ''} {listed(missing)}" if missing else ""


def reach_store(place: ServerPlace, timeout_s: float, on_silence: Callable[[int, int, float], None]) -> StoreAccess:
    """Open the access to the store: serve it at server 0, and on other servers wait until server 0 answers.

    `on_silence(port of the store, server, seconds)` is called at server 0 for a server that gives no sign of life.
    Raises `LaunchError` if server 0 does not answer within `timeout_s`, or if another program answers.
    """
    if place.servers == 1:
        os.environ.setdefault(handshake.VARIABLE, handshake.new_secret())
        listener = loopback_listener()
        port = listener.getsockname()[1]
        return StoreAccess(place, port, listener.detach())
    handshake.check_secret(os.environ)
    key = handshake.key_of(os.environ)
    if place.server == 0:
        listener = loopback_listener()
        port = listener.getsockname()[1]
        gateway = StoreGateway(place.address, place.port, key, port, timeout_s, partial(on_silence, port))
        return StoreAccess(place, port, listener.detach(), gateway)
    await_server_0(place, key, timeout_s)
    relay = StoreRelay(place.address, place.port, key, place.server, timeout_s)
    return StoreAccess(place, relay.port, relay=relay)


def await_server_0(place: ServerPlace, key: bytes, timeout_s: float) -> None:
    """Wait for the handshake with server 0. Raises `LaunchError` if it does not succeed in time, or if another program
    answers.
    """
    began, noted = time.monotonic(), False
    where = f"server 0 at {place.address}, port {place.port}"
    while True:
        left_s = began + timeout_s - time.monotonic()
        try:
            attempt_s = max(0.1, min(handshake.ATTEMPT_S, left_s))
            handshake.connect(place.address, place.port, key, Purpose.PROBE, place.server, attempt_s).close()
        except HandshakeFailed:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
        if time.monotonic() - began > timeout_s:
            raise LaunchError(
                f"{where} did not answer within {timeout_s:g} s ({reason}): check MASTER_ADDR and MASTER_PORT, and "
                "that the launch with NODE_RANK=0 runs"
            )
        if not noted and time.monotonic() - began > NOTE_S:
            noted = True
            print_status(f"note: waiting for {where}: {reason}")
        time.sleep(RETRY_S)


def split_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the arguments of launch.sh: (options that say which server this is, all arguments for torchrun)."""
    end = arguments.index("-m") if "-m" in arguments else len(arguments)
    found: dict[str, str] = {}
    rest: list[str] = []
    words = iter(arguments[:end])
    for word in words:
        if word == "--standalone":
            found[word] = ""
        elif word in _PLACE_OPTIONS:
            found[word] = next(words, "")
        else:
            rest.append(word)
    if nodes := found.get("--nnodes"):
        rest += ["--nnodes", nodes]
    return found, [*rest, *arguments[end:]]

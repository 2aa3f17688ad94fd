"""Connects the launchers of several servers to the store of server 0, which listens on its loopback interface only.

Server 0 has a gateway at MASTER_PORT. It accepts peers that know the launch's secret (`handshake`), and passes their
bytes on to the store. Every other server has a relay on its own loopback interface, which its launcher and its workers
use as the store. Gateway and relays are threads of the launchers, and so end with them. Torch-free.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from pipeplan_launch.elastic import handshake
from pipeplan_launch.elastic.handshake import Purpose
from pipeplan_launch.elastic.local_workers import LOOPBACK, is_local_name
from pipeplan_launch.errors import LaunchError

# Connections whose peers have not yet proved that they know the launch's secret.
#
# A peer that knows the secret answers within a round trip, so few connections are enough, and each lasts a few seconds
# at most. Other peers can open any number of connections. When there is no room, one connection is closed at random, of
# the address with the most connections. So a flood from one address closes its own connections, and a server that
# shares this address still gets through after a few attempts.

MOST, MOST_OF_ADDRESS = 128, 32
"""Largest number of connections in total, and from one address."""
_SHARE_OF_FILES = 8
"""Strangers use at most one in `_SHARE_OF_FILES` of the files that this process may open."""
T = TypeVar("T")


class Strangers(Generic[T]):
    """The connections without a completed handshake. `T`: the type that represents a connection."""

    def __init__(self, most: int | None = None, most_of_address: int = MOST_OF_ADDRESS) -> None:
        """`most`: connections in total; None: `MOST`, or fewer if the process may open only few files."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(2, min(MOST, files // _SHARE_OF_FILES)) if most is None else most
        self._most_of_address = min(most_of_address, self._most)
        self._origins: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, connection: T, address: str) -> T | None:
        """Count a new connection. Returns the connection that must be closed to make room, if any."""
        origin, counts = origin_of(address), Counter(self._origins.values())
        victim = None
        if counts[origin] >= self._most_of_address:
            victim = self._one_of(origin)
        elif len(self._origins) >= self._most:
            victim = self._one_of(max(counts, key=counts.__getitem__))
        self._origins[connection] = origin
        return victim

    def remove(self, connection: T) -> None:
        """Stop counting a connection, if it is counted."""
        self._origins.pop(connection, None)

    def _one_of(self, origin: str) -> T:
        victim = random.choice([connection for connection, own in self._origins.items() if own == origin])
        del self._origins[victim]
        return victim


def origin_of(address: str) -> str:
    """The part of a peer's address that it cannot choose freely: in IPv6 the network of 64 bits, else the address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


HANDSHAKE_S = 5.0
"""Time within which a peer must send its whole answer."""
_FULL_S = 0.05
"""Pause after a connection that could not be accepted because this process has too many open files."""
ALIVE = b"."
_CHUNK = 1 << 16


def loopback_listener(port: int = 0) -> socket.socket:
    """A socket that listens on the loopback interface. `port`: 0 for any free port."""
    return socket.create_server((LOOPBACK, port), backlog=1024)


def heartbeat_interval_s(patience_s: float) -> float:
    """Seconds between two signs of life, if silence for `patience_s` counts as the end."""
    return min(2.0, patience_s / 8)


class StoreGateway:
    """The gateway of server 0."""

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        store_port: int,
        patience_s: float,
        on_silence: Callable[[int, float], None],
    ) -> None:
        """Listen at `address` if it belongs to this machine, else on all addresses of the machine.

        `on_silence(server, seconds)` is called, in a separate thread, when a server that had joined gives no sign of
        life for `patience_s`. Raises `LaunchError` if the port cannot be used.
        """
        self._key, self._store_port, self._patience_s = key, store_port, patience_s
        self._on_silence = on_silence
        self._seen: dict[int, float] = {}
        self._silent: set[int] = set()
        listener = _listen(address, port)
        _in_thread(lambda: self._serve(listener), "gateway")

    def joined(self) -> set[int]:
        """The servers that have joined."""
        return set(self._seen) | self._silent

    async def _serve(self, listener: socket.socket) -> None:
        accepting = asyncio.create_task(self._accept_all(listener))
        interval_s = heartbeat_interval_s(self._patience_s)
        while not accepting.done():
            began = time.monotonic()
            await asyncio.sleep(interval_s)
            if time.monotonic() - began < 2 * interval_s:  # else this process was suspended, and the others were not
                self._look_for_silence()
        await accepting

    async def _accept_all(self, listener: socket.socket) -> None:
        """Accept connections one by one. `Strangers` limits the number of connections without a handshake."""
        loop, strangers = asyncio.get_running_loop(), Strangers[asyncio.Task[None]]()
        listener.setblocking(False)
        tasks = set()  # asyncio itself keeps only weak references to tasks
        while True:
            try:
                connection, place = await loop.sock_accept(listener)
            except OSError:  # the peer has already left, or this process has too many open files
                await asyncio.sleep(_FULL_S)
                continue
            task = loop.create_task(self._welcome(connection, strangers))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if (victim := strangers.add(task, str(place[0]))) is not None:
                victim.cancel()
            await asyncio.sleep(0)  # `sock_accept` does not yield if a connection is waiting

    async def _welcome(self, connection: socket.socket, strangers: Strangers[asyncio.Task[None]]) -> None:
        """Shake hands, and then serve the peer until either end closes the connection."""
        task = asyncio.current_task()
        assert task is not None
        known = None
        try:
            with suppress(OSError, TimeoutError, EOFError):
                known = await self._shake_hands(connection)
        finally:
            strangers.remove(task)
            if known is None:
                connection.close()
        if known is not None:
            with suppress(OSError):  # the peer is gone already
                reader, writer = await asyncio.open_connection(sock=connection)
                await _quietly(partial(self._serve_peer, *known))(reader, writer)

    async def _shake_hands(self, connection: socket.socket) -> tuple[Purpose, int] | None:
        """(purpose, number of the server) of a peer that knows the secret, else None."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(HANDSHAKE_S):
            hello = handshake.new_hello()
            await loop.sock_sendall(connection, hello)
            answer = b""
            while len(answer) < handshake.ANSWER_BYTES:
                chunk = await loop.sock_recv(connection, handshake.ANSWER_BYTES - len(answer))
                if not chunk:
                    raise EOFError
                answer += chunk
            known = handshake.check_answer(self._key, hello, answer)
            reply = handshake.REFUSAL if known is None else handshake.reply_to(self._key, hello, answer)
            await loop.sock_sendall(connection, reply)
        return known

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for number, seen in list(self._seen.items()):
            if now - seen > self._patience_s:
                del self._seen[number]
                self._silent.add(number)
                threading.Thread(target=self._on_silence, args=(number, now - seen), daemon=True).start()

    async def _serve_peer(
        self, purpose: Purpose, server: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if purpose is Purpose.STORE:
            await _join(reader, writer, *await asyncio.open_connection(LOOPBACK, self._store_port))
        elif purpose is Purpose.HEARTBEAT:
            await self._listen_to(server, reader, writer)

    async def _listen_to(self, server: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._silent.discard(server)
        self._seen[server] = time.monotonic()
        while await reader.read(1) == ALIVE:
            self._seen[server] = time.monotonic()
            self._silent.discard(server)
            writer.write(ALIVE)


class StoreRelay:
    """The relay of any other server: a port of its loopback interface that leads to the store."""

    def __init__(self, address: str, port: int, key: bytes, server: int, patience_s: float) -> None:
        self._target = (address, port, key)
        self._server, self._patience_s = server, patience_s
        listener = loopback_listener()
        self.port: int = listener.getsockname()[1]
        _in_thread(lambda: self._serve(listener), "relay")

    def store_answers(self, timeout_s: float) -> bool:
        """Whether the handshake with server 0's gateway succeeds within this time."""
        try:
            self._connect(Purpose.PROBE, timeout_s).close()
        except (OSError, LaunchError):
            return False
        return True

    def _connect(self, purpose: Purpose, timeout_s: float) -> socket.socket:
        return handshake.connect_patiently(*self._target, purpose, self._server, timeout_s)

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(_quietly(self._pass_on), sock=listener)
        async with server:
            while True:
                with suppress(OSError, LaunchError, TimeoutError, asyncio.IncompleteReadError):
                    await self._live()
                await asyncio.sleep(heartbeat_interval_s(self._patience_s))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = await asyncio.to_thread(self._connect, Purpose.STORE, self._patience_s)
        await _join(reader, writer, *await asyncio.open_connection(sock=connection))

    async def _live(self) -> None:
        """Give signs of life until the connection breaks, or until the gateway gives no sign of life."""
        connection = await asyncio.to_thread(self._connect, Purpose.HEARTBEAT, self._patience_s)
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            while True:
                writer.write(ALIVE)
                async with asyncio.timeout(self._patience_s):
                    await reader.readexactly(1)
                await asyncio.sleep(heartbeat_interval_s(self._patience_s))
        finally:
            writer.close()


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens at an address of this machine, or at all its addresses if `address` is not its own."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, _, _, _, place in found:
        # The machine's own host name may mean its loopback interface here only (127.0.1.1 in Debian's /etc/hosts).
        if ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback and not is_local_name(address):
            continue
        with suppress(OSError):
            return socket.create_server(place[:2], family=family, backlog=1024)
    try:
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise LaunchError(
            f"MASTER_PORT {port} cannot be used on this machine ({os.strerror(error.errno or 0)}): give all launches "
            "another one"
        ) from error


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Pass bytes on in both directions until one end closes; then close the other."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, other_writer))
            group.create_task(_copy(other_reader, writer))
    finally:
        other_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError  # ends the other direction too


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def _quietly(handle: Handler) -> Handler:
    """A handler that closes its connection at the end, and ignores errors that the peer causes."""

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, LaunchError, TimeoutError, EOFError, ExceptionGroup):
                await handle(reader, writer)
        finally:
            writer.close()

    return handled


def _in_thread(serve: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True, name=name).start()

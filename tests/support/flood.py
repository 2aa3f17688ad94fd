"""Strangers who open connections to a gateway without knowing the secret, in a process of their own.

    python flood.py PORT COUNT SECONDS KIND

`COUNT` connections are kept open for as long as the gateway allows. With `again` in KIND, those that it closes are
opened again at once. The process prints `flooding` once it has opened `COUNT` connections, and ends after `SECONDS`.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pipeplan_launch.elastic import handshake

HOST = "127.0.0.1"
ANSWERS: dict[str, Callable[[], bytes]] = {
    "idle": lambda: b"",
    "half": lambda: os.urandom(handshake.ANSWER_BYTES // 2),
    "wrong": lambda: os.urandom(handshake.ANSWER_BYTES),
    "slow": lambda: b"x",
    "brief": lambda: b"",
}
"""What a stranger sends: nothing, half an answer, a wrong one, a byte a second, or nothing before it closes."""


@contextmanager
def flood(port: int, count: int, seconds: float, kind: str = "idle") -> Iterator[None]:
    """Flood a port of this machine meanwhile; begins when all connections have been opened."""
    command = [sys.executable, __file__, str(port), str(count), str(seconds), kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "flooding\n"
        assert process.poll() is None
        yield
        assert process.poll() is None, "the flood ended too early to prove anything"
    finally:
        process.kill()
        process.communicate()


def _open(port: int, kind: str) -> socket.socket | None:
    connection = socket.socket()
    try:
        connection.settimeout(5)
        connection.connect((HOST, port))
        connection.sendall(ANSWERS[kind]())
    except OSError:
        connection.close()
        return None
    connection.setblocking(False)
    return connection


def _is_closed(connection: socket.socket) -> bool:
    with suppress(BlockingIOError):
        try:
            while data := connection.recv(4096):
                del data
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        return True
    return False


def main(port: int, count: int, seconds: float, kind: str) -> None:
    """Flood, and end after some time."""
    kind, _, again = kind.partition("-")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    until, opened, ready = time.monotonic() + seconds, list[socket.socket](), False
    fed = time.monotonic()
    while time.monotonic() < until:
        missing = range(count - len(opened)) if again or kind == "brief" or not ready else ()
        for _ in missing:
            if (connection := _open(port, kind)) is not None:
                if kind == "brief":
                    connection.close()
                else:
                    opened.append(connection)
        if not ready:
            ready = True
            print("flooding", flush=True)
        poll = select.poll()
        for connection in opened:
            poll.register(connection, select.POLLIN)
        readable = {number for number, _ in poll.poll(50)}
        if again:
            closed = [one for one in opened if one.fileno() in readable and _is_closed(one)]
            opened = [one for one in opened if one not in set(closed)]
            for one in closed:
                one.close()
        if kind == "slow" and time.monotonic() - fed > 1:
            fed = time.monotonic()
            for one in opened:
                with suppress(OSError):
                    one.sendall(b"x")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])

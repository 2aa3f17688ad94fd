"""How a server of a launch shows server 0 that it knows the launch's secret, and server 0 shows the same. Torch-free.

    server 0   →  MAGIC, 32 random bytes s
    the other  →  32 random bytes c, its purpose, its number, HMAC(key, "client", s, c, purpose, number)
    server 0   →  status, HMAC(key, "server", s, c, purpose, number, status)

All messages have a fixed length, nothing else is read from a peer before its HMAC was compared, and neither side sends
anything from which the key could be computed. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import random
import secrets
import socket
import struct
import time
from enum import IntEnum

from pipeplan_launch.errors import LaunchError

MAGIC = b"pipeplan gateway 1\n"
NONCE_BYTES, MAC_BYTES = 32, 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
_PURPOSE = struct.Struct("!BI")
ANSWER_BYTES = NONCE_BYTES + _PURPOSE.size + MAC_BYTES
REPLY_BYTES = 1 + MAC_BYTES
ACCEPTED, REFUSED = 0, 1


ATTEMPT_S = 5.0
"""Time for one attempt to reach server 0."""
RETRY_S = 0.1
"""Longest pause between two attempts."""


class Purpose(IntEnum):
    """The purpose of a connection."""

    PROBE = 0
    """Nothing else: it is closed again."""
    STORE = 1
    """Everything that follows goes to the store, and back."""
    HEARTBEAT = 2
    """Signs of life in both directions."""


class HandshakeFailed(LaunchError):
    """The other side is no gateway of this launch, and will not become one by waiting."""


def new_hello() -> bytes:
    """The first message of server 0."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def check_answer(key: bytes, hello: bytes, answer: bytes) -> tuple[Purpose, int] | None:
    """(purpose, number of the server) of an answer to `hello`; None if its sender does not know the key."""
    body, mac = answer[:-MAC_BYTES], answer[-MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, b"client", hello, body)):
        return None
    purpose, server = _PURPOSE.unpack(body[NONCE_BYTES:])
    try:
        return Purpose(purpose), server
    except ValueError:
        return None


def reply_to(key: bytes, hello: bytes, answer: bytes) -> bytes:
    """The last message of server 0 to one that it accepts."""
    status = bytes([ACCEPTED])
    return status + _mac(key, b"server", hello, answer[:-MAC_BYTES] + status)


REFUSAL = bytes([REFUSED]) + bytes(MAC_BYTES)
"""The last message of server 0 to one that does not know the key."""


def connect(address: str, port: int, key: bytes, purpose: Purpose, server: int, timeout_s: float) -> socket.socket:
    """A connection to the gateway of server 0, after the handshake. It has no timeout.

    Raises `HandshakeFailed` if another program answers there or the secrets differ, and `OSError` if nothing answers
    in time.
    """
    connection = socket.create_connection((address, port), timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _receive(connection, HELLO_BYTES, MAGIC)
        body = secrets.token_bytes(NONCE_BYTES) + _PURPOSE.pack(purpose, server)
        connection.sendall(body + _mac(key, b"client", hello, body))
        reply = _receive(connection, REPLY_BYTES)
        if reply == REFUSAL:
            raise HandshakeFailed("the secret of this launch is not the one of server 0: set the same on all servers")
        if not hmac.compare_digest(reply[1:], _mac(key, b"server", hello, body + reply[:1])):
            raise HandshakeFailed(f"another program than server 0 of this launch answers at {address}, port {port}")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_patiently(
    address: str, port: int, key: bytes, purpose: Purpose, server: int, timeout_s: float
) -> socket.socket:
    """As `connect`, but after a connection that was closed or silent it tries again until the time is up.

    The gateway closes connections at random when others flood it.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            attempt_s = max(0.1, min(ATTEMPT_S, deadline - time.monotonic()))
            return connect(address, port, key, purpose, server, attempt_s)
        except (ConnectionResetError, BrokenPipeError, TimeoutError):
            if time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0, RETRY_S))


def _receive(connection: socket.socket, count: int, beginning: bytes = b"") -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError("it closed the connection")
        data += chunk
        if beginning[: len(data)] != data[: len(beginning)]:
            peer = connection.getpeername()
            raise HandshakeFailed(f"another program answers at {peer[0]}, port {peer[1]}: choose another MASTER_PORT")
    return data


def _mac(key: bytes, role: bytes, hello: bytes, body: bytes) -> bytes:
    return hmac.digest(key, role + hello + body, "sha256")

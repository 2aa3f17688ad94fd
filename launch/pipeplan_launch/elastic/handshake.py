"""The secret of a launch, and the handshake by which its servers prove that they know the secret. Torch-free.

    PIPEPLAN_SECRET         the secret itself, at least 16 characters
    PIPEPLAN_SECRET_FILE    a file that holds it, which only its owner may read (mode 0600)

A run on one machine makes a secret of its own. The launchers for ssh and SLURM make one for each launch. In the
handshake every message has a fixed length:

    server 0   →  MAGIC, 32 random bytes s
    the other  →  32 random bytes c, its purpose, its number, HMAC(key, "client", s, c, purpose, number)
    server 0   →  status, HMAC(key, "server", s, c, purpose, number, status)

Nothing else is read from a peer before its HMAC was compared, and no message reveals the key. The data after the
handshake is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import secrets
import socket
import stat
import struct
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

from pipeplan_launch.errors import LaunchError

VARIABLE = "PIPEPLAN_SECRET"
FILE_VARIABLE = "PIPEPLAN_SECRET_FILE"
MIN_CHARACTERS = 16
_MAX_BYTES = 4096


def new_secret() -> str:
    """A new secret that cannot be guessed."""
    return secrets.token_hex(32)


def read_secret(environment: Mapping[str, str]) -> str | None:
    """The secret of this launch, None if none is given. Raises `LaunchError` if it is too short, or in a file that
    others may read.
    """
    secret, source = environment.get(VARIABLE, "").strip(), VARIABLE
    if not secret and (file := environment.get(FILE_VARIABLE)):
        secret, source = _from_file(Path(file)), file
    if not secret:
        return None
    if len(secret) < MIN_CHARACTERS:
        raise LaunchError(f"the secret in {source} is shorter than {MIN_CHARACTERS} characters: openssl rand -hex 32")
    return secret


def check_secret(environment: Mapping[str, str]) -> None:
    """Raise `LaunchError` if a launch on several servers has no secret."""
    if read_secret(environment) is None:
        raise LaunchError(
            f"several servers need a secret by which they know each other: set {VARIABLE} to the same value on all of "
            f"them (openssl rand -hex 32), or {FILE_VARIABLE} to a file of mode 0600 that holds it"
        )


def key_of(environment: Mapping[str, str]) -> bytes:
    """The key made from the secret, or from an empty secret if there is none."""
    return hashlib.sha256(b"pipeplan launch " + (read_secret(environment) or "").encode()).digest()


def stop_token(environment: Mapping[str, str]) -> str:
    """The value that proves that a request to stop comes from a worker of this launch."""
    return hmac.digest(key_of(environment), b"stop", "sha256").hex()


def _from_file(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise LaunchError(f"{FILE_VARIABLE}: {path} is not a regular file")
            if found.st_mode & 0o077:
                raise LaunchError(f"{FILE_VARIABLE}: others may read {path}: chmod 600 {path}")
            return os.read(descriptor, _MAX_BYTES).decode("ascii", "replace").strip()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise LaunchError(f"{FILE_VARIABLE}: reading {path} failed: {error.strerror or error}") from error


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
    """Only the handshake: the connection is then closed."""
    STORE = 1
    """Traffic to the store and back."""
    HEARTBEAT = 2
    """Signs of life in both directions."""


class HandshakeFailed(LaunchError):
    """The other end is not the gateway of this launch, and waiting does not help."""


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
    """The last message of server 0 to a peer that it accepts."""
    status = bytes([ACCEPTED])
    return status + _mac(key, b"server", hello, answer[:-MAC_BYTES] + status)


REFUSAL = bytes([REFUSED]) + bytes(MAC_BYTES)
"""The last message of server 0 to a peer that does not know the key."""


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
    """`connect`, which tries again after a closed or silent connection until the time is up.

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

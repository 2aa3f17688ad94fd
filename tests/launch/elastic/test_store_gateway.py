"""The way to the store of server 0: who knows the secret gets there, who does not gets nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pipeplan_launch.elastic import handshake, servers
from pipeplan_launch.elastic.handshake import HandshakeFailed, Purpose
from pipeplan_launch.elastic.servers import ServerPlace
from pipeplan_launch.elastic.store_gateway import LOOPBACK, StoreGateway, StoreRelay
from pipeplan_launch.errors import LaunchError

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
PATIENCE_S = 30.0
"""For what should come at once, on a loaded machine."""


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def store() -> Any:
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def port(store: Any) -> int:
    """Of a gateway to the store."""
    port = free_port()
    StoreGateway(LOOPBACK, port, KEY, store.port, PATIENCE_S, lambda *_: None)
    return port


def test_the_store_is_reached_through_a_relay(store: Any, port: int) -> None:
    relay = StoreRelay(LOOPBACK, port, KEY, 1, PATIENCE_S)
    client = TCPStore(LOOPBACK, relay.port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    client.set("key", "x" * 500_000)
    assert store.get("key") == b"x" * 500_000
    assert client.get("key") == b"x" * 500_000
    assert relay.store_answers(PATIENCE_S)


def test_another_secret_opens_nothing(store: Any, port: int) -> None:
    with pytest.raises(HandshakeFailed, match=r"^the secret of this launch is not the one of server 0"):
        handshake.connect(LOOPBACK, port, OTHER_KEY, Purpose.STORE, 1, PATIENCE_S)
    assert not StoreRelay(LOOPBACK, port, OTHER_KEY, 1, PATIENCE_S).store_answers(PATIENCE_S)


def _replayed(port: int) -> bytes:
    """The answer of a true server to another greeting."""
    sent: list[bytes] = []

    def listen(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(handshake.new_hello())
            sent.append(connection.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL))

    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=listen, args=(listener,))
        thread.start()
        with pytest.raises(OSError, match="closed"):
            handshake.connect(LOOPBACK, listener.getsockname()[1], KEY, Purpose.STORE, 1, PATIENCE_S)
        thread.join()
    return sent[0]


@pytest.mark.parametrize(
    "answer",
    [
        lambda _port: bytes(handshake.ANSWER_BYTES),
        lambda _port: os.urandom(handshake.ANSWER_BYTES),
        lambda _port: b"\x03\x00\x00\x00" * 50,
        _replayed,
    ],
    ids=["zeros", "noise", "a client of the store", "replayed"],
)
def test_a_stranger_gets_a_greeting_and_a_refusal(store: Any, port: int, answer: Callable[[int], bytes]) -> None:
    with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as stranger:
        stranger.sendall(answer(port))
        received = b""
        try:
            while chunk := stranger.recv(4096):
                received += chunk
        except ConnectionResetError:  # it had sent more than was read
            pass
    assert received.startswith(handshake.MAGIC)
    assert received[handshake.HELLO_BYTES :] in (b"", handshake.REFUSAL)
    assert store.num_keys() <= 1  # torch's own


def _answering(text: bytes) -> Iterator[int]:
    """A port where a program says this to everybody."""
    listener = socket.create_server((LOOPBACK, 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.sendall(text)

    threading.Thread(target=answer, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


@pytest.mark.parametrize("text", [b"SSH-2.0-OpenSSH_9.6\r\n", b"p", b"pipeplan gateway 2\n" + bytes(99)])
def test_another_program_is_named_at_once(text: bytes) -> None:
    began = time.monotonic()
    for port in _answering(text):
        with pytest.raises(LaunchError) as caught:
            servers.await_server_0(ServerPlace(1, 2, LOOPBACK, port), KEY, 0.5 if text == b"p" else PATIENCE_S)
        line = str(caught.value)
        assert "another program answers at 127.0.0.1, port" in line or "did not answer within 0.5 s (timed out)" in line
        assert "\n" not in line
    assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize("address", [LOOPBACK, "no-such-host.invalid"])
def test_nobody_at_the_address_is_one_line_in_time(address: str) -> None:
    with pytest.raises(
        LaunchError, match=r"^server 0 at .*, port \d+ did not answer within 0.5 s \(.*\): check MASTER"
    ):
        servers.await_server_0(ServerPlace(1, 2, address, free_port()), KEY, 0.5)


def test_a_silent_server_is_noticed_and_one_that_leaves_is_not(store: Any) -> None:
    silent: list[int] = []
    noticed = threading.Event()

    def notice(server: int, silent_s: float) -> None:
        assert silent_s > 0.4
        silent.append(server)
        noticed.set()

    port = free_port()
    gateway = StoreGateway(LOOPBACK, port, KEY, store.port, 0.4, notice)
    leaves = handshake.connect(LOOPBACK, port, KEY, Purpose.HEARTBEAT, 1, PATIENCE_S)
    frozen = handshake.connect(LOOPBACK, port, KEY, Purpose.HEARTBEAT, 2, PATIENCE_S)
    StoreRelay(LOOPBACK, port, KEY, 3, 0.4)  # gives signs of life
    for connection in (leaves, frozen):
        connection.sendall(b".")
        assert connection.recv(1) == b"."
    leaves.sendall(b"x")
    assert noticed.wait(PATIENCE_S)
    assert not threading.Event().wait(1.0)
    assert silent == [2]
    assert gateway.joined() == {1, 2, 3}


def test_secrets_are_read_from_where_nobody_else_can(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    by_file = {"PIPEPLAN_SECRET_FILE": str(path)}
    assert handshake.read_secret(by_file) == "0123456789abcdef"
    assert handshake.key_of(by_file) == handshake.key_of({"PIPEPLAN_SECRET": "0123456789abcdef"})
    assert handshake.stop_token(by_file) != handshake.stop_token({"PIPEPLAN_SECRET": "0123456789abcdeg"})
    path.chmod(0o640)
    with pytest.raises(LaunchError, match=f"others may read {path}: chmod 600"):
        handshake.read_secret(by_file)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(LaunchError, match="is not a regular file"):
        handshake.read_secret({"PIPEPLAN_SECRET_FILE": str(tmp_path / "fifo")})
    with pytest.raises(LaunchError, match="No such file"):
        handshake.read_secret({"PIPEPLAN_SECRET_FILE": str(tmp_path / "none")})

"""The way to the store of server 0: who knows the secret gets there, also in a flood of strangers, who get nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from flood import flood
from launching import free_port
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pipeplan_launch.elastic import handshake, servers, store_gateway
from pipeplan_launch.elastic.handshake import HandshakeFailed, Purpose
from pipeplan_launch.elastic.servers import ServerPlace
from pipeplan_launch.elastic.store_gateway import LOOPBACK, StoreGateway, StoreRelay, Strangers, origin_of
from pipeplan_launch.errors import LaunchError

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
PATIENCE_S = 30.0
"""For what should come at once, on a loaded machine."""


@pytest.fixture
def store() -> Any:
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def port(store: Any) -> int:
    """Of a gateway to the store."""
    port = free_port()
    StoreGateway(LOOPBACK, port, KEY, store.port, PATIENCE_S, lambda *_: None)
    return port


def connect(port: int, key: bytes = KEY, purpose: Purpose = Purpose.STORE, server: int = 1) -> socket.socket:
    return handshake.connect(LOOPBACK, port, key, purpose, server, PATIENCE_S)


def client_of(relay: StoreRelay) -> Any:
    return TCPStore(LOOPBACK, relay.port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    with suppress(OSError):
        while chunk := connection.recv(4096):
            found += chunk
    return found


def test_the_store_is_reached_through_a_relay_with_the_secret_alone(store: Any, port: int) -> None:
    relay = StoreRelay(LOOPBACK, port, KEY, 1, PATIENCE_S)
    client = client_of(relay)
    client.set("key", "x" * 500_000)
    assert store.get("key") == client.get("key") == b"x" * 500_000
    assert relay.store_answers(PATIENCE_S)
    with pytest.raises(HandshakeFailed, match=r"^the secret of this launch is not the one of server 0"):
        connect(port, OTHER_KEY)
    assert not StoreRelay(LOOPBACK, port, OTHER_KEY, 1, PATIENCE_S).store_answers(PATIENCE_S)


@contextmanager
def program(serve: Any) -> Iterator[int]:
    """A port where a program serves every connection in its own way."""
    with socket.create_server((LOOPBACK, 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    serve(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]


def replayed() -> bytes:
    """The answer of a true server to another greeting."""
    sent: list[bytes] = []

    def listen(connection: socket.socket) -> None:
        with connection:
            connection.sendall(handshake.new_hello())
            sent.append(connection.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL))

    with program(listen) as port, pytest.raises(OSError, match="closed"):
        connect(port)
    return sent[0]


def test_a_stranger_gets_a_greeting_and_a_refusal(store: Any, port: int) -> None:
    """Zeros, noise, a client of the store, and a replayed answer."""
    size = handshake.ANSWER_BYTES
    for answer in (bytes(size), os.urandom(size), b"\x03\x00\x00\x00" * 50, replayed()):
        with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as stranger:
            stranger.sendall(answer)
            given = received(stranger)
        assert given.startswith(handshake.MAGIC)
        assert given[handshake.HELLO_BYTES :] in (b"", handshake.REFUSAL)
        assert store.num_keys() <= 1  # torch's own


def test_another_program_or_nobody_is_one_line_in_time() -> None:
    said = []
    for text in (b"SSH-2.0-OpenSSH_9.6\r\n", b"pipeplan gateway 2\n" + bytes(99), b"p"):
        began, kept = time.monotonic(), list[socket.socket]()

        def answer(one: socket.socket, text: bytes = text, kept: list[socket.socket] = kept) -> None:
            kept.append(one)  # so that it stays open
            one.sendall(text)

        with program(answer) as port, pytest.raises(LaunchError) as caught:
            servers.await_server_0(ServerPlace(1, 2, LOOPBACK, port), KEY, 0.5 if text == b"p" else PATIENCE_S)
        assert time.monotonic() - began < PATIENCE_S
        said.append(str(caught.value))
    assert all("another program answers at 127.0.0.1, port" in line for line in said[:2])
    assert "did not answer within 0.5 s (timed out)" in said[2]
    for address in (LOOPBACK, "no-such-host.invalid"):
        with pytest.raises(
            LaunchError, match=r"^server 0 at .*, port \d+ did not answer within 0.5 s \(.*\): check MA"
        ):
            servers.await_server_0(ServerPlace(1, 2, address, free_port()), KEY, 0.5)
    assert "\n" not in "".join(said)


def test_a_silent_server_is_noticed(store: Any) -> None:
    silent: list[tuple[int, bool]] = []
    noticed = threading.Event()

    def notice(server: int, silent_s: float) -> None:
        silent.append((server, silent_s > 0.4))
        noticed.set()

    port = free_port()
    gateway = StoreGateway(LOOPBACK, port, KEY, store.port, 0.4, notice)
    frozen = connect(port, purpose=Purpose.HEARTBEAT, server=2)
    StoreRelay(LOOPBACK, port, KEY, 3, 0.4)  # gives signs of life
    frozen.sendall(b".")
    assert frozen.recv(1) == b"."
    assert noticed.wait(PATIENCE_S)
    assert not threading.Event().wait(1.0)
    assert silent == [(2, True)]
    assert gateway.joined() == {2, 3}


def test_secrets_are_read_from_where_nobody_else_can(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    by_file = {"PIPEPLAN_SECRET_FILE": str(path)}
    assert handshake.read_secret(by_file) == "0123456789abcdef"
    assert handshake.key_of(by_file) == handshake.key_of({"PIPEPLAN_SECRET": "0123456789abcdef"})
    assert handshake.stop_token(by_file) != handshake.stop_token({"PIPEPLAN_SECRET": "0123456789abcdeg"})
    path.chmod(0o640)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, says in (
        ("secret", f"others may read {path}: chmod 600"),
        ("fifo", "not a regular"),
        ("none", "No such"),
    ):
        with pytest.raises(LaunchError, match=says):
            handshake.read_secret({"PIPEPLAN_SECRET_FILE": str(tmp_path / name)})


def connections_to(port: int) -> int:
    """Files of this process that are connections accepted at a port."""
    mark = f":{port:04X}"
    inodes = set()
    with open("/proc/net/tcp", encoding="ascii") as table:
        for line in table:
            fields = line.split()
            if fields[1].endswith(mark) and fields[3] != "0A":
                inodes.add(fields[9])
    held = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            held += os.readlink(link).removeprefix("socket:[").removesuffix("]") in inodes
    return held


@pytest.mark.parametrize("kind", ["idle-again", "slow", "wrong-again", "brief"])
def test_a_flood_keeps_no_server_out(store: Any, port: int, kind: str) -> None:
    relay = StoreRelay(LOOPBACK, port, KEY, 1, PATIENCE_S)
    early = client_of(relay)
    with flood(port, 1200, 60, kind):
        began = time.monotonic()
        handshake.connect_patiently(LOOPBACK, port, KEY, Purpose.PROBE, 2, PATIENCE_S).close()
        late = client_of(relay)
        for number in range(20):
            early.set("key", str(number))
            assert late.get("key") == str(number).encode()
        assert time.monotonic() - began < PATIENCE_S
        # Two of the server's own connections, its sign of life, and one that the accepting task may just have taken.
        assert connections_to(port) <= store_gateway.MOST_OF_ADDRESS + 6


def test_a_stranger_has_a_few_seconds_for_all_of_its_answer(
    store: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_gateway, "HANDSHAKE_S", 0.3)
    with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as stranger:
        began = time.monotonic()
        with suppress(OSError):
            for _ in range(handshake.ANSWER_BYTES - 1):
                stranger.sendall(b"x")
                time.sleep(0.02)
        given = received(stranger)
        assert time.monotonic() - began < handshake.ANSWER_BYTES * 0.02, "its bytes did not prolong its time"
        assert len(given) == handshake.HELLO_BYTES


def test_the_address_with_the_most_connections_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Strangers[int](most=8, most_of_address=4)
    assert [known.add(number, "10.0.0.1") for number in range(4)] == [None] * 4
    for number in range(4, 100):
        assert known.add(number, "10.0.0.1") in range(number)
    assert len(known) == 4
    assert [known.add(100 + number, f"10.0.1.{number}") for number in range(4)] == [None] * 4
    for number in range(104, 107):  # others keep theirs as long as one address has more
        victim = known.add(number, f"10.0.2.{number}")
        assert victim is not None
        assert victim < 100
    assert len(known) == 8
    for number in range(100, 107):
        known.remove(number)
    known.remove(100)
    assert len(known) == 1
    victims: Counter[int | None] = Counter()
    for _ in range(300):
        known = Strangers[int](most=4, most_of_address=4)
        for number in range(4):
            known.add(number, "10.0.0.1")
        victims[known.add(4, "10.0.0.1")] += 1
    assert set(victims) == {0, 1, 2, 3}, "which connection makes room is random"
    monkeypatch.setattr(store_gateway.resource, "getrlimit", lambda _which: (64, 64))
    known = Strangers[int]()
    for number in range(100):
        known.add(number, f"10.0.0.{number}")
    assert len(known) == 8, "few files leave few places"


def test_addresses_that_a_peer_can_choose_count_as_one() -> None:
    for one, other, same in (
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
    ):
        assert (origin_of(one) == origin_of(other)) is same


def test_a_closed_connection_is_tried_again_and_a_wrong_secret_is_not(store: Any, port: int) -> None:
    with pytest.raises(HandshakeFailed, match="the secret of this launch"):
        handshake.connect_patiently(LOOPBACK, port, OTHER_KEY, Purpose.STORE, 1, PATIENCE_S)
    closed: list[None] = []
    with (
        program(lambda one: closed.append(one.close())) as closing,
        pytest.raises(OSError, match=r"closed|timed|reset"),
    ):
        handshake.connect_patiently(LOOPBACK, closing, KEY, Purpose.STORE, 1, 1.0)
    assert len(closed) >= 3

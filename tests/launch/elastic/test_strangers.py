"""Floods of connections without the secret: who knows it gets through all the same, and keeps what he has."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from flood import flood
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pipeplan_launch.elastic import handshake, store_gateway
from pipeplan_launch.elastic.handshake import HandshakeFailed, Purpose
from pipeplan_launch.elastic.local_workers import LOOPBACK
from pipeplan_launch.elastic.store_gateway import StoreGateway, StoreRelay, Strangers, origin_of

KEY = b"k" * 32
PATIENCE_S = 30.0


@pytest.fixture
def store() -> Any:
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def port(store: Any) -> int:
    """Of a gateway to the store."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        port = int(probe.getsockname()[1])
    StoreGateway(LOOPBACK, port, KEY, store.port, PATIENCE_S, lambda *_: None)
    return port


def connections_to(port: int) -> int:
    """Files of this process that are connections accepted at a port."""
    mark = f":{port:04X}"
    inodes = set()
    with open("/proc/net/tcp", encoding="ascii") as table:
        for line in table:
            fields = line.split()
            if fields[1].endswith(mark) and fields[3] != "0A":
                inodes.add(fields[9])
    held = (os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _exists(number))
    return sum(link.startswith("socket:[") and link[8:-1] in inodes for link in held)


def _exists(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


@pytest.mark.parametrize("kind", ["idle", "idle-again", "half", "slow", "wrong-again", "brief"])
def test_a_flood_keeps_no_server_out(store: Any, port: int, kind: str) -> None:
    relay = StoreRelay(LOOPBACK, port, KEY, 1, PATIENCE_S)
    early = TCPStore(LOOPBACK, relay.port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    with flood(port, 1200, 60, kind):
        began = time.monotonic()
        handshake.connect_patiently(LOOPBACK, port, KEY, Purpose.PROBE, 2, PATIENCE_S).close()
        late = TCPStore(LOOPBACK, relay.port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
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
        received = b""
        try:
            for _ in range(handshake.ANSWER_BYTES - 1):
                stranger.sendall(b"x")
                time.sleep(0.02)
        except OSError:
            pass
        try:
            while chunk := stranger.recv(4096):
                received += chunk
        except OSError:
            pass
        assert time.monotonic() - began < handshake.ANSWER_BYTES * 0.02, "its bytes did not prolong its time"
        assert len(received) == handshake.HELLO_BYTES


def test_the_address_with_the_most_connections_makes_room() -> None:
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


def test_which_connection_makes_room_is_random() -> None:
    victims: Counter[int | None] = Counter()
    for _ in range(300):
        known = Strangers[int](most=4, most_of_address=4)
        for number in range(4):
            known.add(number, "10.0.0.1")
        victims[known.add(4, "10.0.0.1")] += 1
    assert set(victims) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
    ],
)
def test_addresses_that_a_peer_can_choose_count_as_one(one: str, other: str, same: bool) -> None:
    assert (origin_of(one) == origin_of(other)) is same


def test_few_files_leave_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_gateway.resource, "getrlimit", lambda _which: (64, 64))
    known = Strangers[int]()
    for number in range(100):
        known.add(number, f"10.0.0.{number}")
    assert len(known) == 8


def test_a_closed_connection_is_tried_again_and_a_wrong_secret_is_not(store: Any, port: int) -> None:
    with pytest.raises(HandshakeFailed, match="the secret of this launch"):
        handshake.connect_patiently(LOOPBACK, port, b"o" * 32, Purpose.STORE, 1, PATIENCE_S)
    with socket.create_server((LOOPBACK, 0)) as closing:
        closing.settimeout(PATIENCE_S)
        began = time.monotonic()
        import threading

        def close_all() -> None:
            for _ in range(3):
                closing.accept()[0].close()

        thread = threading.Thread(target=close_all)
        thread.start()
        with pytest.raises(OSError, match=r"closed|timed out|reset"):
            handshake.connect_patiently(LOOPBACK, closing.getsockname()[1], KEY, Purpose.STORE, 1, 1.0)
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it tried three times"
        assert time.monotonic() - began < PATIENCE_S

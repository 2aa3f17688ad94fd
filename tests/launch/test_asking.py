"""Questions to the workers' store end, whether or not it answers; a server that is cut off from it, too."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from pipeplan_launch import gathering, succession
from pipeplan_launch.asking import Asked
from pipeplan_launch.errors import PeerLost
from pipeplan_launch.gathering import Attempt
from pipeplan_launch.oversight import Reach

PATIENCE_S = 30.0
"""For what should come at once, on a loaded machine."""


class Silent:
    """A store behind a link that is cut."""

    def __init__(self) -> None:
        self.asked = 0
        self.heals = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.asked += 1
        self.heals.wait(PATIENCE_S)
        return amount


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def test_a_store_that_does_not_answer_is_asked_once() -> None:
    silent = Silent()
    asked = Asked(silent, patience_s=0.05)
    with pytest.raises(RuntimeError, match=r"did not answer within 0\.05 s"):
        asked.add("a", 1)
    with pytest.raises(RuntimeError, match="does not answer"):
        asked.under("b").add("a", 1)
    assert silent.asked == 1
    silent.heals.set()


def test_answers_and_errors_are_those_of_the_store(store: Any) -> None:
    asked = Asked(store).under("a").under("b")
    assert asked.add("number", 2) == 2
    assert asked.compare_set("name", "", "first") == b"first"
    asked.set("name", "second")
    assert asked.get("name") == b"second"
    assert asked.check(["name", "number"])
    assert not asked.check(["another"])
    assert gathering._under("b", gathering._under("a", store)).get("name") == b"second", "torch's keys are the same"


class Broken:
    """A store whose server is gone."""

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("connection closed")


def test_what_asking_raises_is_raised() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        Asked(Broken()).add("a", 1)


def attempt_of(store: Any, number: int, rank: int) -> Attempt:
    launch = Asked(store)
    return Attempt(number, gathering._under(str(number), store), launch, rank, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_a_worker_that_was_started_again_is_told(
    store: Any, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "EVERY_S", 0.01)
    monkeypatch.setattr(succession, "GRACE_S", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    store.add("attempt", 1)
    store.set("1/go", "")
    told = threading.Event()
    attempt = attempt_of(store, 1, 1 - rank)
    assert not attempt.is_succeeded()
    succession.watch(attempt, told.set)
    assert not told.wait(0.1)
    arrival = threading.Thread(target=_arrive, args=(store, rank), daemon=True)
    arrival.start()
    assert told.wait(PATIENCE_S)
    arrival.join(PATIENCE_S)


def _arrive(store: Any, rank: int) -> None:
    client = dist.TCPStore("127.0.0.1", store.port)  # type: ignore[attr-defined]
    with suppress(PeerLost):  # nobody comes to its attempt
        if rank:
            gathering._come(client, rank, deadline=0.0)
        else:
            gathering._call_together(client, 2, deadline=0.0)


def test_a_launcher_gives_up_on_a_store_that_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        gave_up = threading.Event()
        reach = Reach(address, 0.2, gave_up.set)
        reach.ask(True)
        assert not gave_up.wait(0.5), "it can be reached"
    assert gave_up.wait(PATIENCE_S)
    unasked = threading.Event()
    Reach(address, 0.0, unasked.set)
    assert not unasked.wait(0.3), "nobody wants to know"

"""Questions to the workers' store end, whether or not it answers, and go on once it does; cut-off servers end, too."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pipeplan_launch.elastic import rendezvous
from pipeplan_launch.elastic.rendezvous import Attempt
from pipeplan_launch.elastic.store import StoreClient, StoreTimeout
from pipeplan_launch.errors import PeerLost
from pipeplan_launch.rank_mapping.host_identity import Location, location_json, locations_json
from pipeplan_launch.worker_monitor import StoreReachability

PATIENCE_S = 30.0
"""For what should come at once, on a loaded machine."""


class Silent:
    """A store behind a link that is cut."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_asked = threading.Event()
        self.heals = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.asked.append(key)
        self.is_asked.set()
        self.heals.wait(PATIENCE_S)
        return amount


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def answered(asked: StoreClient, key: str) -> int:
    """Once the answer to an earlier question has come, which takes the store's thread a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return asked.add(key, 7)
        except StoreTimeout:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_store_that_does_not_answer_is_asked_once_until_it_does() -> None:
    """Who asks meanwhile waits no longer than who asked first."""
    silent = Silent()
    asked, ends = StoreClient(silent, patience_s=1.0), list[float]()

    def ask() -> None:
        with pytest.raises(StoreTimeout, match=r"did not answer within 1(\.0)? s"):
            asked.under("b").add("a", 1)
        ends.append(time.monotonic())

    first = threading.Thread(target=ask)
    first.start()
    assert silent.is_asked.wait(PATIENCE_S)
    time.sleep(0.8)
    with pytest.raises(StoreTimeout):
        asked.add("second", 1)
    end = time.monotonic()
    first.join(PATIENCE_S)
    assert end - ends[0] < 0.7, "not 0.8 s after it"
    silent.heals.set()
    assert answered(asked, "third") == 7
    assert silent.asked == ["b/a", "third"], "nobody waits for the second any more"


def test_answers_and_errors_are_those_of_the_store(store: Any) -> None:
    asked = StoreClient(store, PATIENCE_S).under("a").under("b")
    assert asked.add("number", 2) == 2
    assert asked.compare_set("name", "", "first") == b"first"
    asked.set("name", "second")
    assert asked.get("name") == b"second"
    assert (asked.check(["name", "number"]), asked.check(["another"])) == (True, False)
    assert rendezvous._under("b", rendezvous._under("a", store)).get("name") == b"second", "torch's keys are the same"
    silent = Silent()
    threading.Timer(0.2, silent.heals.set).start()
    assert [StoreClient(silent, PATIENCE_S).add(key, 3) for key in ("a", "b")] == [3, 3], "in time ends the silence"
    broken: Any = SimpleNamespace(add=lambda key, amount: [][0])
    with pytest.raises(IndexError):
        StoreClient(broken, PATIENCE_S).add("a", 1)


def attempt_of(store: Any, number: int, rank: int) -> Attempt:
    launch = StoreClient(store, PATIENCE_S)
    return Attempt(number, rendezvous._under(str(number), store), launch, rank, 2)


def _arrive(store: Any, rank: int) -> None:
    client = dist.TCPStore("127.0.0.1", store.port)  # type: ignore[attr-defined]
    with suppress(PeerLost):  # nobody comes to its attempt
        if rank:
            rendezvous._join_attempt(client, rank, deadline=0.0, own_location_json="")
        else:
            rendezvous._assemble_attempt(client, 2, deadline=0.0, own_location_json="")


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_a_worker_that_was_started_again_is_told(
    store: Any, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    store.add("attempt", 1)
    store.set("1/go", locations_json([]))
    told = threading.Event()
    reasons: list[str] = []
    attempt = attempt_of(store, 1, 1 - rank)
    assert not attempt.is_superseded()
    rendezvous.watch_for_restart(attempt, lambda reason: reasons.append(reason) or told.set())  # type: ignore[func-returns-value]
    assert not told.wait(0.1)
    arrival = threading.Thread(target=_arrive, args=(store, rank), daemon=True)
    arrival.start()
    assert told.wait(PATIENCE_S)
    arrival.join(PATIENCE_S)
    assert reasons == [rendezvous.LOST_MID_MESSAGE]


def watched(*answers: bool | Exception) -> list[str]:
    """What is told by who watches an attempt of which the store says at one look after another whether it is over."""
    left, told = list(answers), list[str]()

    def is_superseded() -> bool:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    attempt: Any = SimpleNamespace(
        is_superseded=is_superseded,
        store_place=lambda: " on server 0 (host alpha)",
        silence=lambda: None if left else "server 1 gave no sign of life for 8 s",
    )
    rendezvous._watch(attempt, told.append)
    return told


def test_who_waits_for_a_silent_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's server, and any other whose silence is in the store; an error the main thread finds out."""
    monkeypatch.setattr(rendezvous, "WATCH_INTERVAL_S", 0.0)
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.0)
    (line,) = watched(False, StoreTimeout("it did not answer within 8 s"))
    assert line == "the workers' common store on server 0 (host alpha) is silent: it did not answer within 8 s"
    assert watched(False, False, True) == ["server 1 gave no sign of life for 8 s"]
    assert watched(False, RuntimeError("connection closed")) == []


def test_the_host_and_the_workers_of_a_silent_server_are_named(store: Any) -> None:
    """Its silence ends the attempt."""
    ours = dist.PrefixStore("pipeplan", store)  # type: ignore[attr-defined]
    store.add("pipeplan/attempt", 3)
    rendezvous.end_attempt(store.port, "server 1 gave\x1b[2J no sign")
    attempt = attempt_of(ours, 3, 0)
    assert attempt.is_superseded()
    assert attempt.silence() == "server 1 gave [2J no sign"
    assert attempt_of(ours, 4, 0).last_fault() is not None
    alpha, beta = (Location("m", host, "n", launcher) for host, launcher in (("alpha", "0"), ("beta", "1")))
    store.set("pipeplan/3/go", locations_json([location_json(one) for one in (alpha, beta, beta)]))
    store.delete_key("pipeplan/3/silent")
    rendezvous.end_attempt(store.port, "server 1 gave no sign of life for 8 s", 1)
    silent = "server 1 gave no sign of life for 8 s (host beta, workers 1 and 2)"
    assert attempt.silence() == silent
    launch = attempt.launch_store
    assert rendezvous._absence(launch, 1, [1, 2]) == "workers 1 and 2 did not come"
    assert rendezvous._absence(launch, 4, [1, 2]) == f"workers 1 and 2 did not come, after {silent}"
    store.delete_key("pipeplan/3/silent")
    assert rendezvous._absence(launch, 4, [1, 2]) == "workers 1 and 2 did not come (before on beta)"
    placed = replace(attempt, locations=(alpha, beta, beta))
    assert (attempt.store_place(), placed.store_place()) == ("", " on server 0 (host alpha)")


def test_a_launcher_gives_up_on_a_store_that_is_out_of_reach() -> None:
    answers, gave_up = threading.Event(), threading.Event()
    answers.set()
    reach = StoreReachability(lambda _timeout_s: answers.is_set(), 0.2, gave_up.set)
    reach.watch(True)
    assert not gave_up.wait(0.5), "it can be reached"
    answers.clear()
    assert gave_up.wait(PATIENCE_S)
    unasked = threading.Event()
    StoreReachability(lambda _timeout_s: False, 0.0, unasked.set)
    assert not unasked.wait(0.3), "nobody wants to know"

"""Faults as people write them, and what is made of what happened after one."""

from __future__ import annotations

from typing import Any

import pytest
from fault_contract import ExpectedReplay, Fault, FaultReplayed, judge_fault_replay
from fault_replay import parse_fault
from replay_builders import cluster, two_servers
from replay_network import parts_of

from pipeplan.errors import InputError

SERVERS = parts_of(two_servers(each=2))
ACTIVE = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:worker3", Fault("kill", "worker 3", 3)),
        ("kill:3@20", Fault("kill", "worker 3", 3, after_minibatches=20)),
        ("freeze:rank1@1.5s", Fault("freeze", "worker 1", 1, after_s=1.5)),
        ("freeze", Fault("freeze", "worker 3", 3)),
        ("cut:server0", Fault("cut", "server 0")),
        ("cut", Fault("cut", "server 1")),
        ("cut@7", Fault("cut", "server 1", after_minibatches=7)),
        ("flap:server1:500ms@2s", Fault("flap", "server 1", lasts_s=0.5, after_s=2.0)),
        ("flap:server1", Fault("flap", "server 1", lasts_s=3.0)),
        ("flap:2s", Fault("flap", "server 1", lasts_s=2.0)),
    ],
)
def test_a_fault_is_understood(text: str, fault: Fault) -> None:
    assert parse_fault(text, ACTIVE, SERVERS) == fault


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is no fault ''"),
        ("kil:worker1", "did you mean 'kill'?"),
        ("kill:worker4", "its stages are on workers 0 to 3"),
        ("kill:server1", "its stages are on workers 0 to 3"),
        ("cut:server2", "did you mean 'server1' or 'server0'?"),
        ("cut:worker0", "there is no link of 'worker0'"),
        ("kill:worker0:worker1", "expected kill:worker3"),
        ("kill:", "expected kill:worker3"),
        ("flap:server1:x", "expected kill:worker3"),
        ("flap:server1:3", "expected a time such as 3s, found '3'"),
        ("flap:server1:1e6s", "1e6s is too long"),
        ("kill@", "expected a time such as 3s, found ''"),
        ("kill@-3", "expected a time such as 3s, found '-3'"),
        ("kill@3@4", "found '3@4'"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(text: str, why: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_fault(text, ACTIVE, SERVERS)
    assert why in str(raised.value)
    assert str(raised.value).startswith(f"--fault {text}: ")


def test_a_single_server_has_links_of_workers() -> None:
    servers = parts_of(cluster(("server", 3, 1e9)))
    assert parse_fault("cut:worker1", (0, 1, 2), servers).target == "worker 1"
    with pytest.raises(InputError, match="cutting it separates none of them"):
        parse_fault("cut", (0,), parts_of(cluster(("server", 1, 0.0))))


def expected(fault: Fault, timeout_s: float = 10.0, minibatches: int = 4) -> ExpectedReplay:
    return ExpectedReplay("1-1", fault, timeout_s, 3, minibatches, last_stage=1, longest_s=0.5)


def life(rank: int, began: float, ended: float | None) -> dict[str, Any]:
    return {"rank": rank, "pid": 10 + rank, "began_s": began, "ended_s": ended}


def record(**changes: Any) -> dict[str, Any]:
    """Two workers that train, and are struck at 100."""
    found = {
        "began_s": 80.0,
        "trains_s": 90.0,
        "struck_s": 100.0,
        "struck_after": 2,
        "healed_s": None,
        "ended_s": [130.0, 130.0],
        "statuses": [0, 0],
        "workers": [life(0, 80.0, 129.0), life(1, 80.0, 129.0)],
        "lines": [],
    }
    return found | changes


def steps(*times: float) -> list[dict[str, Any]]:
    """Lines of the last stage's metrics; the first stage's must not count."""
    last = [{"stage": 1, "minibatch": number, "time_s": time} for number, time in enumerate(times)]
    return [*last, {"stage": 0, "minibatch": 0, "time_s": 101.0}]


def restarted(noticed: float, ended: float, victim: float = 100.1) -> dict[str, Any]:
    lives = [life(1, 80.0, victim), life(0, 80.0, noticed), life(1, ended + 0.1, 129.0), life(0, ended + 0.1, 129.0)]
    line = {"time_s": 110.0, "server": 1, "text": "worker 1 was lost; restart 1 of 3: resumed from x"}
    return record(workers=lives, lines=[line, {"time_s": 111.0, "server": 0, "text": "a warning"}])


def judged(fault: Fault, found: dict[str, Any], *times: float, **changes: Any) -> FaultReplayed:
    return judge_fault_replay(expected(fault, **changes), found, steps(*times), 3.0, 60.0)


def test_a_killed_worker_that_comes_back_is_as_promised() -> None:
    result = judged(Fault("kill", "worker 1", 1), restarted(100.2, 100.2), 95.0, 96.0, 112.0, 113.0)
    assert result.kept, result.broken
    assert result.noticed_s == pytest.approx(0.2)
    assert result.all_ended_s == pytest.approx(0.2)
    assert result.back_s == pytest.approx(12.0)
    assert result.restarts == 1
    assert result.said == ("worker 1 was lost; restart 1 of 3: resumed from x",)
    assert result.done == 4


@pytest.mark.parametrize(
    ("found", "times", "why"),
    [
        (restarted(115.0, 115.0), (95.0, 96.0, 117.0, 118.0), "it was noticed after 15.0 s"),
        (restarted(100.2, 100.2), (95.0, 96.0, 112.0), "3 of 4 minibatches"),
        (record(), (95.0, 96.0, 112.0, 113.0), "there was no restart"),
        (restarted(100.2, 100.2) | {"statuses": [0, 2]}, (95.0, 96.0, 112.0, 113.0), "ended with 0, 2"),
        (restarted(100.2, 100.2) | {"statuses": [0, None]}, (95.0, 96.0, 112.0, 113.0), "not all launchers ended"),
        (record(struck_s=None), (95.0, 96.0, 97.0, 98.0), "the fault never came"),
    ],
    ids=["late", "unfinished", "unnoticed", "error", "hang", "never"],
)
def test_what_is_not_as_promised(found: dict[str, Any], times: tuple[float, ...], why: str) -> None:
    result = judged(Fault("kill", "worker 1", 1), found, *times)
    assert not result.kept
    assert any(why in one for one in result.broken), result.broken


def test_a_minibatch_that_counts_twice_is_not_as_promised() -> None:
    lines = [*steps(95.0, 96.0, 112.0, 113.0), {"stage": 1, "minibatch": 3, "time_s": 114.0}]
    result = judge_fault_replay(expected(Fault("kill", "worker 1", 1)), restarted(100.2, 100.2), lines, 3.0, 60.0)
    assert result.broken == ("4 of 4 minibatches were finished, in 5 lines of metrics",)


def test_a_frozen_worker_must_be_noticed_before_the_timeout_is_over() -> None:
    times = (95.0, 96.0, 115.0, 116.0)
    assert judged(Fault("freeze", "worker 1", 1), restarted(109.9, 109.9, victim=109.4), *times).kept
    assert not judged(Fault("freeze", "worker 1", 1), restarted(113.0, 113.0, victim=113.0), *times).kept


def test_a_short_flap_heals_and_a_long_one_restarts() -> None:
    times = (95.0, 96.0, 104.0, 105.0)
    short, long = (Fault("flap", "server 1", lasts_s=seconds) for seconds in (3.0, 20.0))
    healed = judged(short, record(healed_s=103.0), *times)
    assert healed.kept, healed.broken
    assert healed.back_s == pytest.approx(4.0)
    assert healed.noticed_s is None, "that they end with the run is no sign of the fault"
    assert not judged(short, restarted(110.0, 110.0), *times).kept
    assert not judged(long, record(healed_s=120.0), *times).kept
    assert judged(long, restarted(110.0, 110.0), 95.0, 96.0, 121.0, 122.0).kept


def test_a_cut_must_end_everything_with_an_error() -> None:
    cut = Fault("cut", "server 1")
    lives = [life(0, 80.0, 110.2), life(1, 80.0, 120.0), life(0, 111.0, 121.0)]
    line = {"time_s": 121.0, "server": 0, "text": "error: worker 1 did not come"}
    over = record(workers=lives, statuses=[2, 2], ended_s=[122.0, 131.0], lines=[line])
    result = judged(cut, over, 95.0, 96.0)
    assert result.kept, result.broken
    assert (result.noticed_s, result.all_ended_s, result.over_s) == pytest.approx((10.2, 20.0, 31.0))
    assert result.back_s is None
    assert not judged(cut, over | {"lines": []}, 95.0, 96.0).kept
    assert not judged(cut, over | {"statuses": [2, None], "ended_s": [122.0, None]}, 95.0, 96.0).kept
    assert not judged(cut, over | {"statuses": [2, 0]}, 95.0, 96.0).kept
    late = [life(0, 80.0, 114.0), lives[1], lives[2]]
    assert any("no worker ended within 12.5 s" in one for one in judged(cut, over | {"workers": late}).broken)

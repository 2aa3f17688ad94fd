"""What several servers lack: what slows data parallelism down most is named, and nothing where it scales."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run, check_refusals

import pipeplan
from pipeplan.cli.servers import facts_of
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.explanation.slow_servers import (
    CARD,
    DIRECTION,
    LINK,
    LOADER,
    SLOW_SERVER,
    SWITCH,
    ServerFacts,
    SlowServers,
    diagnose_servers,
    servers_lines,
    with_others,
    with_speeds,
)
from pipeplan.util.deadline import NO_DEADLINE, Deadline
from pipeplan_measure.pair_schedule import (
    ALL_PAIRS_AT_ONCE,
    MESSAGE,
    MeasuredLinks,
    OneWay,
    PairRates,
    ServerCheck,
    TimedOperation,
)

GBIT = 1.25e8
VGG = pipeplan.read_profile("vgg16-v100")
DEVICE = Device("V100", "cuda", 16 << 30)
NAMES = ("one", "two")
CARDS = (("large", 1.0), ("small", 0.5))


def cluster(gbit_s: float, cards: tuple[float, ...] = (), workers: int = 4) -> Cluster:
    inside = Level("server", workers, 12e9, 1e-5)
    between = Level("cluster", 2, gbit_s * GBIT, 5e-5)
    if not cards:
        return Cluster("two", DEVICE, (inside, between))
    machines = [Server(DEVICE, inside, card * GBIT) for card in cards]
    return Cluster.of_servers("two", machines, [between])


def facts(
    speeds: tuple[float, ...] = (1.0, 1.0), there: float = 10.0, back: float = 10.0, together: float = 1.0
) -> ServerFacts:
    one_way = ((0, 1, there * GBIT), (1, 0, back * GBIT))
    return ServerFacts(NAMES, speeds, one_way, together)


def diagnosed(machines: Cluster, known: ServerFacts, read_s: float = 0.0) -> SlowServers:
    profile = replace(VGG, read_s=read_s)
    return diagnose_servers(profile, with_speeds(machines, known.speeds), known, NO_DEADLINE)


def test_the_cause_is_named() -> None:
    """By the servers, what is known of them, and the seconds that reading a minibatch takes."""
    for machines, known, read_s, expected in (
        (cluster(1), facts(), 0.0, LINK),
        (cluster(10), facts(), 0.0, LINK),
        (cluster(25), facts(), 0.0, LINK),
        (cluster(200), facts(), 0.0, None),
        (cluster(1), facts(there=10, back=1), 0.0, DIRECTION),
        (cluster(10, cards=(10, 1)), facts(), 0.0, CARD),
        (cluster(1), facts(together=0.1), 0.0, SWITCH),
        (cluster(100), facts(speeds=(1.0, 0.6)), 0.0, SLOW_SERVER),
        (cluster(100), facts(), 0.3, LOADER),
        # A direction that is slower, but fast enough, is not what is wrong.
        (cluster(200), facts(there=400, back=200), 0.0, None),
        (cluster(100), facts(speeds=(1.0, 0.6), there=100, back=50), 0.0, SLOW_SERVER),
    ):
        found = diagnosed(machines, known, read_s)
        assert (found.bottleneck and found.bottleneck.kind) == expected
        lines = list(servers_lines(found))
        assert lines[-1].startswith("WHY")
        assert len(lines) <= 10
        assert json.loads(json.dumps(found.to_json()))["cluster"]["name"] == "two"


def test_throughputs_are_those_of_the_planner_and_the_rate_that_is_needed_is_enough() -> None:
    found = diagnosed(cluster(10), facts())
    assert found.one_per_s is not None
    assert found.all_per_s < found.one_per_s  # two servers are slower than one
    for share, enough in ((1.0, True), (0.9, False)):
        again = diagnosed(cluster(found.needed_rate / GBIT * share), facts())
        assert (again.scaling >= 0.9) is enough


def test_alternatives_are_those_of_the_planner() -> None:
    found = with_others(diagnosed(cluster(10, workers=2), facts()), VGG, Deadline.after(60))
    per_s = dict(found.others)
    assert per_s["DDP, gradients in bfloat16"] == pytest.approx(diagnosed(cluster(20, workers=2), facts()).all_per_s)
    assert per_s["FSDP"] is not None
    assert max(value for value in per_s.values() if value is not None) > max(found.one_per_s or 0, found.all_per_s or 0)
    assert "HSDP" in per_s


def test_a_slow_server_of_unequal_devices_or_of_islands_is_named() -> None:
    """Two servers of two unequal cards, which are a level of machines; and servers with islands inside."""
    one, other = (Server(Device(name, "cuda", 16 << 30, speed=speed), Level("one", 1, 0.0)) for name, speed in CARDS)
    inside, between = Level("server", 2, 12e9, 1e-5), Level("cluster", 2, 100 * GBIT, 5e-5)
    mixed = Cluster.of_servers("two", [one, other, one, other], [inside, between])
    speeds = [device.speed for device in with_speeds(mixed, (1.0, 0.6)).devices]
    assert speeds == pytest.approx([1.0, 0.5, 0.6, 0.3])
    islands = Cluster("two", DEVICE, (Level("island", 2, 24e9, 1e-5), inside, between))
    assert {device.speed for device in with_speeds(islands, (1.0, 0.6)).devices} == {0.6}
    for machines in (mixed, islands):
        found = diagnosed(machines, facts(speeds=(1.0, 0.6)))
        assert found.bottleneck.kind == SLOW_SERVER


def test_a_model_that_does_not_fit_is_said() -> None:
    small = replace(cluster(10), device=replace(DEVICE, memory_bytes=1 << 30))
    found = diagnosed(small, facts())
    assert (found.all_per_s, found.needed_rate, found.causes) == (None, None, ())
    assert "does not fit" in list(servers_lines(found))[-1]


def test_facts_of_a_measurement() -> None:
    """Four servers of one worker; the third is slow, and two pairs at once reach half of what one does."""

    def timed(kind: str, ranks: tuple[int, ...], seconds: float) -> TimedOperation:
        return TimedOperation(kind, 0, ranks, "Gloo", ((1 << 20, seconds),))

    check = ServerCheck((1.0, 1.0, 2.0, 1.0), (OneWay(0, 1, 5.0),), (0.0, 0.5, -0.25, 0.0))
    operations = (
        timed(MESSAGE, (0, 1), 1.0),
        timed(ALL_PAIRS_AT_ONCE, (0, 1), 2.0),
        timed(ALL_PAIRS_AT_ONCE, (2, 3), 2.0),
    )
    hosts, places = ("a", "b", "b", "c"), ("p", "q", "r", "s")
    measured = MeasuredLinks(PairRates(places, {}), ("m",) * 4, hosts, ({},) * 4, operations, check)
    assert facts_of(measured) == ServerFacts(
        ("a", "b #1", "b #2", "c"), (1.0, 1.0, 0.5, 1.0), ((0, 1, 5.0),), together=0.5, clock_s=0.75
    )


FAKE_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
[ "$2" != away ] || { echo "ssh: Could not resolve hostname away" >&2; exit 255; }
exec sh -c "$3"
"""


def test_hosts_are_asked_by_ssh(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(FAKE_SSH)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("pipeplan.cli.servers.GRACE_S", 0.2)
    hosts = Path("hosts.txt")
    hosts.write_text("here address=127.0.0.1\nthere python=/nowhere/python\n")
    done = run("doctor", "--hosts", "hosts.txt", "--workers", "1")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: there: ")
    assert "/nowhere/python" in done.err
    assert len(done.err.splitlines()) == 1
    hosts.write_text("away\nhere address=127.0.0.1\n")
    done = run("doctor", "--hosts", "hosts.txt", "--workers", "1")
    assert (done.code, done.err) == (2, "error: away: ssh: Could not resolve hostname away\n")


def test_what_makes_no_sense_is_one_line(run: Run) -> None:
    check_refusals(
        run,
        {
            "doctor --workers 2": "--workers and --profile go with --hosts or --servers",
            "doctor plan --servers 2": "leave out the plan and --selftest",
            "doctor --hosts none.txt --servers 2": "not both",
            "doctor --hosts none.txt": "cannot read none.txt",
            "doctor --servers 2": "run this on each with NODE_RANK=0 to 1",
            "doctor --servers 1 --workers 2": "--servers takes 2 or more, not 1",
        },
    )

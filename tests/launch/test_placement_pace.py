"""What slower links cost: against the planner's judge, told the same rates; and what is said of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_workers import stage_contents, write_plan

from pipeplan.cluster_data import Cluster, Device, Level
from pipeplan.evaluate import evaluate
from pipeplan.files import write_json
from pipeplan.problem import Options, Problem
from pipeplan.profile_data import Layer, Profile, Tensor
from pipeplan.rendering.documents import stage_documents
from pipeplan.solving import Outcome, Settings, solve
from pipeplan_launch.arguments import parser
from pipeplan_launch.config import LaunchPlan, load_plan
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.placement.crossing import Team, rounds, teams
from pipeplan_launch.placement.notes import gbit, notes
from pipeplan_launch.placement.pace import pace_s
from pipeplan_launch.placement.reality import Reality
from pipeplan_launch.placement.seats import Seats
from pipeplan_launch.placement.where import Where

GIVEN = {
    "1f1b-stashing": Options(memory=False, allow_copies=False),
    "vertical-sync": Options(memory=False, allow_copies=False, schedule="vertical-sync"),
    "2bw": Options(memory=False, allow_copies=False, schedule="2bw", accumulate=8),
    "gpipe": Options(memory=False, allow_copies=False, schedule="gpipe", accumulate=8),
    "1f1b-flush": Options(memory=False, allow_copies=False, schedule="1f1b-flush", accumulate=8),
    "inference": Options(memory=False, allow_copies=False, inference=True),
    "parallel": Options(memory=False, allow_copies=False, boundary="parallel"),
}


def problem(seed: int, options: Options, servers: int = 3) -> Problem:
    """A chain whose traffic keeps the links between servers of two busy for a part of the pace."""
    draw = random.Random(seed)
    times = [draw.uniform(0.5, 1.5) for _ in range(7)]
    pace = 3 * sum(times) / (2 * servers)
    layers = tuple(
        Layer(f"l{index}", time, 2 * time, 10**7 * draw.choice([1, 3, 10, 30]), 0) for index, time in enumerate(times)
    )
    sizes = [int(draw.uniform(0.5, 1.5) * draw.choice([0.1, 0.3, 0.6]) * pace * 1e8) for _ in times[1:]]
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), size, size) for i, size in enumerate(sizes))
    levels = (Level("server", 2, 1e9, 1e-4), Level("cluster", servers, 1e8, 1e-3, 0.7, 0.9))
    profile = Profile(layers, tensors, 1, model_ref="m")
    return Problem(profile, Cluster("c", Device("d", "cpu", 1), levels), options)


def loaded(outcome: Outcome, folder: Path) -> LaunchPlan:
    """As the executor reads it."""
    for index, document in enumerate(stage_documents(outcome)):
        write_json(folder / "stages" / f"stage-{index}.json", document)
    return load_plan(folder)


def seats_of(plan: LaunchPlan, hosts: Sequence[str] = ()) -> Seats:
    """As planned, or on the hosts that are given by process."""
    sizes = [plan.workers_on(server) for server in range(plan.servers)]
    hosts = hosts or [f"host {server}" for server, size in enumerate(sizes) for _ in range(size)]
    return Seats.of(sizes, [Where(host, host, "") for host in hosts])


def slowed(plan: LaunchPlan, seats: Seats, factor: float) -> Reality:
    """All that a probe measures is so many times slower than planned."""
    planned = Reality(plan, seats)
    return Reality(plan, seats, {team: planned.planned(team) / factor for one in rounds(plan, seats) for team in one})


@pytest.mark.parametrize("kind", GIVEN)
def test_slower_links_cost_what_the_planner_says(kind: str, tmp_path: Path) -> None:
    bound = 0
    for seed in (0, 2):
        given = problem(seed, GIVEN[kind])
        outcome = solve(given, Settings(solver="dp", certify=False))
        plan = loaded(outcome, tmp_path / str(seed))
        for factor in (1.0, 2.0, 5.0):
            low, high = given.cluster.levels
            cluster = replace(given.cluster, levels=(low, replace(high, bandwidth=high.bandwidth / factor)))
            expected = evaluate(outcome.plan, replace(given, cluster=cluster)).pace_s
            assert pace_s(plan, slowed(plan, seats_of(plan), factor)) == pytest.approx(expected, rel=1e-6)
            bound += expected > 1.2 * outcome.evaluation.pace_s
    assert bound or kind == "inference"


def test_data_parallelism_waits_for_its_all_reduce(tmp_path: Path) -> None:
    """How much of it is hidden the stage files do not tell: from below, and not far."""
    given = problem(3, replace(GIVEN["1f1b-stashing"], stages=1))
    outcome = solve(given, Settings(solver="dp", certify=False))
    plan, (low, high) = loaded(outcome, tmp_path), given.cluster.levels
    for factor in (2.0, 5.0):
        slow = replace(given.cluster, levels=(low, replace(high, bandwidth=high.bandwidth / factor)))
        expected = evaluate(outcome.plan, replace(given, cluster=slow)).pace_s
        found = pace_s(plan, slowed(plan, seats_of(plan), factor))
        assert found is not None
        assert 0.8 * expected < found <= expected * (1 + 1e-9)


PREDICTION = {
    "minibatch_s": 0.02,
    "forward_s": 0.006,
    "backward_s": 0.012,
    "update_s": 0.0,
    "sync_s": 0.0,
    "exposed_s": 0.0,
    "parameter_bytes": 1_000_000,
    "boundary_s": 0.0,
    "send_bytes": 0,
    "receive_gradient_bytes": 0,
}
INSIDE = {"name": "server", "span": [2, 1], "sendrecv": [1e10, None], "allreduce": [1e10, None]}
BETWEEN = {"name": "cluster", "span": 3, "sendrecv": 1e9, "allreduce": 5e8, "latency_s": 0.0, "cards_s": 0.01}
LINKS = [INSIDE | {"latency_s": 0.0, "cards_s": None}, BETWEEN]


def straight(folder: Path, **changes: Any) -> LaunchPlan:
    """1-1-1 on a server of two and one of one: 31.2 MB inside the first take 3.12 ms, 10 MB to the second 10 ms."""
    contents = stage_contents([1, 1, 1])
    given = {"servers": 2, "workers_per_server": 2, "server_sizes": [2, 1], "links": LINKS} | changes
    sent = [(31_200_000, 0.00312), (10_000_000, 0.01), (0, 0.0)]
    for content, (size, seconds) in zip(contents, sent, strict=True):
        sends = {"send_bytes": size, "receive_gradient_bytes": size, "boundary_s": seconds}
        content |= given | {"prediction": PREDICTION | sends}
    return load_plan(write_plan(folder, contents))


def test_workers_that_are_apart_are_named_with_what_it_costs(tmp_path: Path) -> None:
    """They have the rate that is planned between servers: 31.2 MB take 31.2 ms."""
    plan = straight(tmp_path)
    assert notes(plan, seats_of(plan), {}) == []
    assert notes(plan, seats_of(plan, "ABB"), {}) == []  # the sizes say which server is which
    (line,) = notes(plan, seats_of(plan, "ABC"), {})
    assert line == (
        "note: workers 0 and 1, meant to share a server, are on different machines (A, B): "
        "31.2 ms a minibatch instead of 20, 36% slower"
    )
    # Measured between their machines: half of it.
    (line,) = notes(plan, seats_of(plan, "ABC"), {Team((0, 1), 0, False, 0.1): 5e8})
    assert line.endswith("62.4 ms a minibatch instead of 20, 68% slower")
    # Without the plan's rates, nobody knows what it costs.
    bare = straight(tmp_path / "bare", links=None)
    assert notes(bare, seats_of(bare, "ABC"), {}) == [line.partition(": 62")[0]]


def test_a_slow_link_is_named_with_what_it_costs(tmp_path: Path) -> None:
    plan = straight(tmp_path)
    seats = seats_of(plan)
    (team,) = teams(plan, seats)
    assert (team.workers, team.stage, team.is_ring) == ((1, 2), 1, False)
    (line,) = notes(plan, seats, {team: 2.5e8})
    assert line == (
        "note: between host 0 and host 1 2 Gbit/s are reached, the plan was made for 8 Gbit/s: "
        "40 ms a minibatch instead of 20, 50% slower"
    )
    # 10 MB in 20 ms is as fast as the stages are; and faster than planned is no news.
    assert notes(plan, seats, {team: 5.0e8}) == notes(plan, seats, {team: 1e12}) == []


def test_what_keeps_links_busiest_is_measured_first(tmp_path: Path) -> None:
    given = problem(1, replace(GIVEN["1f1b-stashing"], stages=1))
    plan = loaded(solve(given, Settings(solver="dp", certify=False)), tmp_path)
    (ring,) = teams(plan, seats_of(plan))
    assert (ring.is_ring, ring.workers) == (True, tuple(range(len(ring.workers))))
    (line,) = notes(plan, seats_of(plan), {ring: 1e7})
    assert line.startswith(
        "note: all-reduces of stage 0 reach 80 Mbit/s between servers, the plan was made for 560 Mbit"
    )
    several = loaded(solve(problem(0, GIVEN["1f1b-stashing"]), Settings(solver="dp", certify=False)), tmp_path / "two")
    shares = [team.share for team in teams(several, seats_of(several))]
    assert len(shares) > 1
    assert shares == sorted(shares, reverse=True)
    assert not teams(several, seats_of(several, "A" * several.world))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([], "'links' must be a list"),
        ([7], "every entry of 'links' must be an object"),
        ([LINKS[0]], "does not join all 3 workers"),
        ([LINKS[0] | {"span": [2, 2]}, BETWEEN], "'span' of 'links' must add up"),
        ([LINKS[0] | {"span": "two"}, BETWEEN], "'span' of 'links' must be a number"),
        ([LINKS[0] | {"sendrecv": [1.0]}, BETWEEN], "'sendrecv' of 'links' has 1 entries where there are 2 components"),
        ([LINKS[0] | {"allreduce": "fast"}, BETWEEN], "'allreduce' must be a number of at least 0"),
    ],
    ids=str,
)
def test_rates_that_cannot_be_read_are_refused(links: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=message):
        straight(tmp_path, links=links)


def test_rates_for_people_and_seconds_from_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert [gbit(rate) for rate in (1.25e9, 2.375e8, 1.25e7, 1e3)] == [
        "10 Gbit/s",
        "1.9 Gbit/s",
        "100 Mbit/s",
        "8 Kbit/s",
    ]
    assert parser("x").parse_args(["plan"]).probe == 2.0
    assert parser("x").parse_args(["plan", "--probe", "0"]).probe == 0.0
    for wrong in ("-1", "x", "nan", "1e9"):
        with pytest.raises(SystemExit):
            parser("x").parse_args(["plan", "--probe", wrong])
    assert "is not a number of seconds from 0 (no probe) to 600" in capsys.readouterr().err

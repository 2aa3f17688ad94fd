"""What is measured when: everyone meets, nobody is in two places, and what shares cores or cards waits."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from pipeplan_measure import pair_schedule


def places(*sizes: int) -> list[str]:
    return [f"server {number}" for number, size in enumerate(sizes) for _ in range(size)]


def connected(pairs: set[tuple[int, int]], workers: int) -> bool:
    home = list(range(workers))
    for one, other in pairs:
        home = [home[one] if at == home[other] else at for at in home]
    return len(set(home)) == 1


def test_in_a_tournament_everyone_meets_everyone_once() -> None:
    for players in (2, 3, 4, 7, 8):
        rounds = pair_schedule.round_robin(range(players))
        for one in rounds:
            assert len(set(itertools.chain(*one))) == 2 * len(one)
        met = Counter(tuple(sorted(pair)) for one in rounds for pair in one)
        assert met == Counter(itertools.combinations(range(players), 2))


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (3, 1, 2), (8,) * 16, (40,), (1,) * 20], ids=str)
def test_pairs_connect_all_workers_and_share_no_machine(sizes: tuple[int, ...]) -> None:
    where = places(*sizes)
    rounds = pair_schedule.pair_rounds(where, where)
    pairs = [pair for one in rounds for pair in one]
    assert len(set(pairs)) == len(pairs)
    assert all(one < other for one, other in pairs)
    for one in rounds:
        machines = [machine for pair in one for machine in {where[rank] for rank in pair}]
        assert len(set(machines)) == len(machines), "two pairs on one machine disturb each other"
    assert connected(set(pairs), len(where))
    between = {frozenset((where[a], where[b])) for a, b in pairs if where[a] != where[b]}
    assert len(between) == len(sizes) * (len(sizes) - 1) // 2, "every two servers meet"
    if len(where) <= pair_schedule.MAX_WORKERS_ALL_PAIRS:
        assert set(pairs) == set(itertools.combinations(range(len(where)), 2))


def test_what_would_share_cores_or_a_cable_runs_alone() -> None:
    rounds = pair_schedule.pair_rounds(places(2, 2, 2), ["one machine"] * 6)
    assert {len(one) for one in rounds} == {1}
    where = places(*(4,) * 6)
    for one in pair_schedule.pair_rounds(where, where):
        across = [pair for pair in one if where[pair[0]] != where[pair[1]]]
        assert len(across) <= 1, "few pairs of servers might share a cable behind their switches"


def test_jobs_of_two_servers_of_four() -> None:
    where = places(4, 4)
    partitions = (((0, 1, 2, 3), (4, 5, 6, 7)), (tuple(range(8)),))
    jobs = pair_schedule.level_jobs(partitions, where)
    for job in jobs:
        ranks = list(itertools.chain(*job.teams))
        assert len(set(ranks)) == len(ranks)
    found = {
        (job.kind, job.level): [one.teams for one in jobs if (one.kind, one.level) == (job.kind, job.level)]
        for job in jobs
    }
    assert found["message", 1] == [((3, 4),)], "alone"
    assert found["together", 1] == [((0, 4), (1, 5), (2, 6), (3, 7))], "all of a server at once, over its one card"
    assert found["ring", 1] == [(tuple(range(8)),), ((0, 4),)]
    assert found["message", 0] == [((0, 1), (4, 5)), ((1, 2), (5, 6)), ((2, 3), (6, 7))], "servers do not disturb"
    assert found["together", 0] == [((0, 1), (2, 3), (4, 5), (6, 7))]
    assert ((0, 1, 2, 3), (4, 5, 6, 7)) in found["ring", 0]


def test_every_server_of_many_is_measured_with_two_others() -> None:
    where = places(*(2,) * 5)
    partitions = (tuple((rank, rank + 1) for rank in range(0, 10, 2)), (tuple(range(10)),))
    met = Counter(
        where[rank]
        for job in pair_schedule.level_jobs(partitions, where)
        if (job.kind, job.level) == ("message", 1)
        for team in job.teams
        for rank in team
    )
    assert set(met.values()) == {2}


def test_levels_that_join_one_component_have_no_jobs() -> None:
    partitions = (((0,), (1,)), ((0, 1),))
    assert {job.level for job in pair_schedule.level_jobs(partitions, places(1, 1))} == {1}

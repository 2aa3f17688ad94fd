"""The links that a run measures first: which teams, when, who decides, and the notes on slow ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from toy_workers import stage_contents, write_plan

from pipeplan_launch.comm import worker_values
from pipeplan_launch.command_line import worker_parser
from pipeplan_launch.elastic import link_check as checking
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.elastic.link_check import (
    CommunicatingTeam,
    ProbeTask,
    format_rate,
    link_notes,
    teams_across_servers,
)
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.planned_links import PlannedLevel, PlannedLinks
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.rank_mapping.host_identity import Location
from pipeplan_launch.rank_mapping.rank_assignment import RankAssignment

PLANNED = PlannedLinks(
    (PlannedLevel((0, 1, 2), (1e9, 1e9), (1e9, 1e9), (0.0, 0.0)), PlannedLevel((0, 2), (1e8,), (1e8,), (0.0,)))
)


class Workers:
    """Two on a server each, one after the other: worker 0 first."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.store: dict[str, str] = {}
        """Stands for the store that all attempts share."""
        self.probed: list[tuple[int, ProbeTask]] = []
        self.rank, self.shared = 0, b""
        patch.setattr(dist, "get_rank", lambda: self.rank)
        patch.setattr(process_groups, "broadcast", self._share)
        patch.setattr(checking, "probe_links", lambda plan, task, *_: self.probed.append((self.rank, task)) or {})

    def _share(self, value: Any, source: int, group: object, kind: Any) -> Any:
        if self.rank == source:
            self.shared = worker_values.encode(value)
        return worker_values.decode(self.shared, kind)

    def check(self, options: Sequence[tuple[LaunchPlan, float]], hosts: str) -> list[tuple[int, ProbeTask]]:
        """What they measure, of the plan and option that each has."""
        self.probed = []
        launch = SimpleNamespace(
            set=self.store.__setitem__,
            get=lambda key: self.store[key].encode(),
            check=lambda keys: all(key in self.store for key in keys),
        )
        assignment = RankAssignment.of([1, 1], [Location(host, host, "") for host in hosts])
        attempt = SimpleNamespace(launch_store=launch)
        groups: Any = SimpleNamespace(assignment=assignment, everyone=None, attempt=attempt)
        for self.rank, (plan, probe_s) in enumerate(options):
            checking.check_planned_links(plan, groups, probe_s)
        return self.probed


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(monkeypatch)


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    plan = load_plan(write_plan(tmp_path, [one | {"servers": 2} for one in stage_contents([1, 1])]))
    return replace(plan, links=PLANNED, servers=2, workers_per_server=1)


def test_all_measure_what_worker_0_wants_or_none_does(workers: Workers, plan: LaunchPlan) -> None:
    bare = replace(plan, links=None)
    (first, task), (second, same) = workers.check([(plan, 2.0), (bare, 0.0)], "AB")
    assert (first, second) == (0, 1)
    assert same == task
    assert (task.seconds, task.links) == (2.0, PLANNED)
    for options in ([(plan, 0.0), (plan, 2.0)], [(bare, 2.0), (plan, 2.0)]):
        workers.store.clear()
        assert workers.check(options, "AB") == []


def test_after_a_restart_only_where_servers_are_others(workers: Workers, plan: LaunchPlan) -> None:
    both = [(plan, 2.0)] * 2
    assert len(workers.check(both, "AB")) == 2
    assert workers.check(both, "AB") == []
    assert len(workers.check(both, "AC")) == 2
    assert workers.check(both, "AA") == []


PREDICTION = {"minibatch_s": 0.02, "sync_s": 0.0, "parameter_bytes": 1_000_000, "boundary_s": 0.0}
INSIDE = {"name": "server", "span": [2, 1], "sendrecv": [1e10, None], "allreduce": [1e10, None]}
BETWEEN = {"name": "cluster", "span": 3, "sendrecv": 1e9, "allreduce": 5e8, "latency_s": 0.0, "cards_s": 0.01}
LINKS = [INSIDE | {"latency_s": 0.0, "cards_s": None}, BETWEEN]


def loaded(folder: Path, replicas: Sequence[int], predictions: Sequence[dict[str, Any]], **changes: Any) -> LaunchPlan:
    """A plan on a server of two workers and a server of one."""
    contents = stage_contents(list(replicas))
    common = {"servers": 2, "workers_per_server": 2, "server_sizes": [2, 1], "links": LINKS} | changes
    for content, prediction in zip(contents, predictions, strict=True):
        content |= common | {"prediction": PREDICTION | prediction}
    return load_plan(write_plan(folder, contents))


def straight(folder: Path, **changes: Any) -> LaunchPlan:
    """1-1-1: the link inside the first server is busy for 15% of the step time, the link to the second for half
    of it.
    """
    return loaded(folder, [1, 1, 1], [{"boundary_s": 0.003}, {"boundary_s": 0.01}, {}], **changes)


def seats_of(plan: LaunchPlan, hosts: Sequence[str] = ()) -> RankAssignment:
    """Workers as planned, or on the hosts that are given by process."""
    sizes = [plan.workers_on(server) for server in range(plan.servers)]
    hosts = hosts or [f"host {server}" for server, size in enumerate(sizes) for _ in range(size)]
    return RankAssignment.of(sizes, [Location(host, host, "") for host in hosts])


def test_workers_that_are_apart_are_named_with_planned_and_measured_rates(tmp_path: Path) -> None:
    plan = straight(tmp_path)
    assert link_notes(plan, seats_of(plan), {}) == []
    assert link_notes(plan, seats_of(plan, "ABB"), {}) == []  # the sizes say which server is which
    apart = seats_of(plan, "ABC")
    (line,) = link_notes(plan, apart, {CommunicatingTeam((0, 1), 0, False, 0.15): 5e8})
    assert line == (
        "note: workers 0 and 1, meant to share a server, are on different machines (A, B): planned 80 Gbit/s, measured "
        "4 Gbit/s, 20 times slower; start as many workers on each server as the plan has there, or solve again for "
        "these servers"
    )
    assert link_notes(plan, apart, {CommunicatingTeam((0, 1), 0, False, 0.15): 9e9}) == []  # apart, and still fast
    # Without a measurement the note has no rates, whether the plan says its rates or not.
    bare = straight(tmp_path / "bare", links=None)
    for unmeasured in (plan, bare):
        (line,) = link_notes(unmeasured, seats_of(unmeasured, "ABC"), {})
        assert "are on different machines (A, B); start as many workers" in line


def test_the_slow_link_that_the_plan_keeps_busiest_is_named(tmp_path: Path) -> None:
    plan = straight(tmp_path)
    assignment = seats_of(plan)
    (team,) = teams_across_servers(plan, assignment)
    assert (team.workers, team.stage, team.is_ring, team.share) == ((1, 2), 1, False, 0.5)
    (line,) = link_notes(plan, assignment, {team: 2.5e8})
    assert line == (
        "note: the link between host 0 and host 1: planned 8 Gbit/s, measured 2 Gbit/s, 4 times slower; check the "
        "network, or measure it with pipeplan profile --links and solve again"
    )
    # A little slower is not worth a note, faster is no news, and nor is a link that carries next to nothing.
    assert link_notes(plan, assignment, {team: 9e8}) == link_notes(plan, assignment, {team: 1e12}) == []
    assert link_notes(plan, assignment, {CommunicatingTeam((1, 2), 1, False, 0.001): 2.5e8}) == []


def test_what_keeps_links_busiest_is_measured_first(tmp_path: Path) -> None:
    plan = loaded(tmp_path, [3], [{"sync_s": 0.02}])
    (ring,) = teams_across_servers(plan, seats_of(plan))
    assert (ring.is_ring, ring.workers) == (True, (0, 1, 2))
    (line,) = link_notes(plan, seats_of(plan), {ring: 1e7})
    assert line.startswith(
        "note: all-reduces of stage 0 between servers: planned 4 Gbit/s, measured 80 Mbit/s, 50 times slower; "
    )
    several = loaded(tmp_path / "several", [2, 1], [{"sync_s": 0.001, "boundary_s": 0.01}, {}], server_sizes=[1, 2])
    found = teams_across_servers(several, seats_of(several))
    assert [team.is_ring for team in found] == [False, True]
    assert found[0].share > found[1].share
    assert not teams_across_servers(several, seats_of(several, "A" * several.world))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([], "links: expected a list that is not empty"),
        ([7], r"links\[0\]: expected a mapping, found 7"),
        ([LINKS[0]], "does not join all 3 workers"),
        ([LINKS[0] | {"span": [2, 2]}, BETWEEN], r"links\[0\]: span: the components do not add up"),
        ([LINKS[0] | {"span": "two"}, BETWEEN], r"span: expected a whole number or a list, found 'two'"),
        ([LINKS[0] | {"sendrecv": [1.0]}, BETWEEN], "sendrecv: 1 entries where there are 2 components"),
        ([LINKS[0] | {"allreduce": "fast"}, BETWEEN], "allreduce: expected a number or a list, found 'fast'"),
    ],
    ids=str,
)
def test_rates_that_cannot_be_read_are_refused(links: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=message):
        straight(tmp_path, links=links)


def test_rates_for_people_and_seconds_from_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert [format_rate(rate) for rate in (1.25e9, 2.375e8, 1.25e7, 1e3)] == [
        "10 Gbit/s",
        "1.9 Gbit/s",
        "100 Mbit/s",
        "8 Kbit/s",
    ]
    assert worker_parser("x").parse_args(["plan"]).probe == 2.0
    assert worker_parser("x").parse_args(["plan", "--probe", "0"]).probe == 0.0
    for wrong in ("-1", "x", "nan", "1e9"):
        with pytest.raises(SystemExit):
            worker_parser("x").parse_args(["plan", "--probe", wrong])
    assert "is not a number of seconds from 0 (no probe) to 600" in capsys.readouterr().err

"""When links are measured, and who decides that."""

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
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.planned_links import PlannedLevel, PlannedLinks
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.rank_mapping.host_identity import Location
from pipeplan_launch.rank_mapping.rank_assignment import RankAssignment
from pipeplan_launch.runtime import link_check as checking
from pipeplan_launch.runtime.link_check import ProbeTask

LINKS = PlannedLinks(
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
    return replace(plan, links=LINKS, servers=2, workers_per_server=1)


def test_all_measure_what_worker_0_wants_or_none_does(workers: Workers, plan: LaunchPlan) -> None:
    bare = replace(plan, links=None)
    (first, task), (second, same) = workers.check([(plan, 2.0), (bare, 0.0)], "AB")
    assert (first, second) == (0, 1)
    assert same == task
    assert (task.seconds, task.links) == (2.0, LINKS)
    for options in ([(plan, 0.0), (plan, 2.0)], [(bare, 2.0), (plan, 2.0)]):
        workers.store.clear()
        assert workers.check(options, "AB") == []


def test_after_a_restart_only_where_servers_are_others(workers: Workers, plan: LaunchPlan) -> None:
    both = [(plan, 2.0)] * 2
    assert len(workers.check(both, "AB")) == 2
    assert workers.check(both, "AB") == []
    assert len(workers.check(both, "AC")) == 2
    assert workers.check(both, "AA") == []

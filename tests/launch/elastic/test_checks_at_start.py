"""What workers compare and measure before they train: data, weights, job files, and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from toy_workers import Toy, run_toy, stage_contents, write_plan

from pipeplan_launch import load_job
from pipeplan_launch.comm import worker_values
from pipeplan_launch.command_line import worker_parser
from pipeplan_launch.elastic import link_check as checking
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.elastic.consistency_check import Fingerprint, check_agreement, digest
from pipeplan_launch.elastic.link_check import CommunicatingTeam, link_notes, teams_across_servers
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.rank_mapping.host_identity import Location
from pipeplan_launch.rank_mapping.rank_assignment import RankAssignment
from pipeplan_launch.runtime.data import data_fingerprint

RANDOM_JOB = """
import random
import numpy
import torch
from pipeplan_launch import Data, Job

OFFSET = random.random() + numpy.random.rand()

def data():
    samples = [(torch.tensor([random.random(), numpy.random.rand()]), int(torch.randint(9, ()))) for _ in range(5)]
    return Data(samples, samples[:2])

def make():
    net = torch.nn.Linear(2, 9)
    net.weight.data += OFFSET + random.random() + numpy.random.rand()
    return Job(net, data=data)
"""


def test_the_same_seed_gives_the_same_job(tmp_path: Path) -> None:
    """Whichever source of random numbers its construction and its data use."""
    (tmp_path / "random_job.py").write_text(RANDOM_JOB)
    one, two, other = (load_job(f"{tmp_path}/random_job.py:make", seed) for seed in (1, 1, 2))
    torch.rand(3)  # what was drawn in between does not matter
    assert digest(one.model.state_dict()) == digest(two.model.state_dict()) != digest(other.model.state_dict())
    assert digest(one.datasets.train) == digest(two.datasets.train) != digest(other.datasets.train)


def test_says_what_differs() -> None:
    """`test_data.py` has samples."""
    samples = [(torch.tensor([float(number)]), number) for number in range(5)]
    marks, fewer = (data_fingerprint("training", samples[:count], 0) for count in (5, 4))
    assert list(marks) == ["the number of training samples", *(f"training sample {n}" for n in (0, 2, 4))]
    check_agreement([Fingerprint(rank, rank, marks, "", job="sha256:a") for rank in range(3)])
    with pytest.raises(LaunchError, match=r"the number of training samples .* \(5 and 4\)"):
        check_agreement([Fingerprint(0, 0, marks), Fingerprint(1, 1, fewer)])
    with pytest.raises(LaunchError, match="initial weights of stage 1 differ between its replicas, ranks 1 and 2"):
        check_agreement([Fingerprint(0, 0, marks, ""), Fingerprint(1, 1, marks, "a"), Fingerprint(2, 1, marks, "b")])
    with pytest.raises(LaunchError, match=r"job's file differs between workers: .* ranks 0 and 1: copy one file"):
        check_agreement([Fingerprint(0, 0, job="sha256:a"), Fingerprint(1, 1, job="sha256:b")])


def test_digests_tell_tensors_apart() -> None:
    values = [torch.zeros(2), torch.zeros(2, 1), torch.zeros(2).double(), torch.tensor(0.0), torch.tensor([]), 0, 0.0]
    values += [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bool), {"a": torch.ones(2)}, (1, 2), [1]]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.ones(3, 2).t()) == digest(torch.ones(2, 3))


def test_a_run_on_different_data_is_refused(tmp_path: Path) -> None:
    ended = run_toy(tmp_path, Toy(other_data_rank=3), [2, 1], idle=1)
    assert ended.statuses == [2, 2, 2, 2]
    (line,) = ended.err.splitlines()
    assert "the data differs between workers: the number of training samples is not the same at ranks 1 and 3" in line


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


class Workers:
    """Three, worker 0 first, who have one store."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.store: dict[str, str] = {}
        """Stands for the store that all attempts share."""
        self.probed: list[Any] = []
        self.rank, self.shared = 0, b""
        patch.setattr(dist, "get_rank", lambda: self.rank)
        patch.setattr(process_groups, "broadcast", self._share)
        patch.setattr(checking, "probe_links", lambda plan, rounds, *_: self.probed.append(rounds) or {})

    def _share(self, value: Any, source: int, group: object, kind: Any) -> Any:
        if self.rank == source:
            self.shared = worker_values.encode(value)
        return worker_values.decode(self.shared, kind)

    def check(self, options: Sequence[tuple[LaunchPlan, float]], hosts: str = "AAB") -> list[Any]:
        """What they measure, of the plan and option that each has."""
        self.probed = []
        launch = SimpleNamespace(
            set=self.store.__setitem__,
            get=lambda key: self.store[key].encode(),
            check=lambda keys: all(key in self.store for key in keys),
        )
        attempt = SimpleNamespace(launch_store=launch)
        assignment = RankAssignment.of([2, 1], [Location(host, host, "") for host in hosts])
        groups: Any = SimpleNamespace(assignment=assignment, everyone=None, attempt=attempt)
        for self.rank, (plan, probe_s) in enumerate(options):
            checking.check_planned_links(plan, groups, probe_s)
        return self.probed


def test_all_measure_what_worker_0_wants_and_again_only_where_servers_are_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workers, plan = Workers(monkeypatch), straight(tmp_path)
    bare = replace(plan, links=None)
    (first, *others) = workers.check([(plan, 2.0), (bare, 0.0), (plan, 1.0)])
    assert others == [first] * 2
    ((team,),) = first
    assert (team.workers, team.planned) == ((1, 2), 1e9)
    for refused in ([(plan, 0.0), (plan, 2.0), (plan, 2.0)], [(bare, 2.0), (plan, 2.0), (plan, 2.0)]):
        workers.store.clear()
        assert workers.check(refused) == []
    workers.store.clear()
    measured = [len(workers.check([(plan, 2.0)] * 3, hosts)) for hosts in ("AAB", "AAB", "AAC", "AAA")]
    assert measured == [3, 0, 3, 0]


def test_workers_that_are_apart_are_named_with_planned_and_measured_rates(tmp_path: Path) -> None:
    plan, team = straight(tmp_path), CommunicatingTeam((0, 1), 0, False, 0.15, 1e10)
    assert link_notes(seats_of(plan), {}) == []
    assert link_notes(seats_of(plan, "ABB"), {}) == []  # the sizes say which server is which
    apart = seats_of(plan, "ABC")
    (line,) = link_notes(apart, {team: 5e8})
    assert line == (
        "note: workers 0 and 1, meant to share a server, are on different machines (A, B): planned 80 Gbit/s, measured "
        "4 Gbit/s, 20 times slower; start as many workers on each server as the plan has there, or solve again for "
        "these servers"
    )
    assert link_notes(apart, {team: 9e9}) == []  # apart, and still fast
    # Without a measurement the note has no rates, whether the plan says its rates or not.
    for unmeasured in (plan, straight(tmp_path / "bare", links=None)):
        (line,) = link_notes(seats_of(unmeasured, "ABC"), {})
        assert "are on different machines (A, B); start as many workers" in line


def test_the_slow_link_that_the_plan_keeps_busiest_is_named(tmp_path: Path) -> None:
    plan = straight(tmp_path)
    assignment = seats_of(plan)
    (team,) = teams_across_servers(plan, assignment)
    assert (team.workers, team.stage, team.is_ring, team.share) == ((1, 2), 1, False, 0.5)
    (line,) = link_notes(assignment, {team: 2.5e8})
    assert line == (
        "note: the link between host 0 and host 1: planned 8 Gbit/s, measured 2 Gbit/s, 4 times slower; check the "
        "network, or measure it with pipeplan profile --links and solve again"
    )
    # A little slower is not worth a note, faster is no news, and nor is a link that carries next to nothing.
    assert link_notes(assignment, {team: 9e8}) == link_notes(assignment, {team: 1e12}) == []
    assert link_notes(assignment, {CommunicatingTeam((1, 2), 1, False, 0.001, 1e9): 2.5e8}) == []


def test_what_keeps_links_busiest_is_measured_first(tmp_path: Path) -> None:
    plan = loaded(tmp_path, [3], [{"sync_s": 0.02}])
    (ring,) = teams_across_servers(plan, seats_of(plan))
    assert (ring.is_ring, ring.workers) == (True, (0, 1, 2))
    (line,) = link_notes(seats_of(plan), {ring: 1e7})
    assert line.startswith(
        "note: all-reduces of stage 0 between servers: planned 4 Gbit/s, measured 80 Mbit/s, 50 times slower; "
    )
    several = loaded(tmp_path / "several", [2, 1], [{"sync_s": 0.001, "boundary_s": 0.01}, {}], server_sizes=[1, 2])
    found = teams_across_servers(several, seats_of(several))
    assert [team.is_ring for team in found] == [False, True]
    assert found[0].share > found[1].share
    assert not teams_across_servers(several, seats_of(several, "A" * several.world))


def test_rates_that_cannot_be_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside: list[tuple[dict[str, Any], str]] = [
        ({"span": [2, 2]}, r"links\[0\]: span: the components do not add up"),
        ({"span": "two"}, r"span: expected a whole number or a list, found 'two'"),
        ({"sendrecv": [1.0]}, "sendrecv: 1 entries where there are 2 components"),
        ({"allreduce": "fast"}, "allreduce: expected a number or a list, found 'fast'"),
    ]
    cases: list[tuple[list[Any], str]] = [
        ([], "links: expected a list that is not empty"),
        ([7], r"links\[0\]: expected a mapping, found 7"),
        ([LINKS[0]], "does not join all 3 workers"),
        *(([LINKS[0] | change, BETWEEN], says) for change, says in inside),
    ]
    for links, says in cases:
        with pytest.raises(LaunchError, match=says):
            straight(tmp_path, links=links)
    assert worker_parser("x").parse_args(["plan"]).probe == 2.0
    assert worker_parser("x").parse_args(["plan", "--probe", "0"]).probe == 0.0
    for wrong in ("-1", "x", "nan", "1e9"):
        with pytest.raises(SystemExit):
            worker_parser("x").parse_args(["plan", "--probe", wrong])
    assert "is not a number of seconds from 0 (no probe) to 600" in capsys.readouterr().err

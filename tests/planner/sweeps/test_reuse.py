"""What one point of a sweep finds makes the next ones cheaper, and changes no answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from extents import slow_but_for
from long_chains import calls_of, long_chain

from pipeplan.cluster_data import variants
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.planning.fast import reusing
from pipeplan.planning.settings import Settings
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.questions import SEARCH
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.known_answers import is_no_better
from pipeplan.solvers.result import Status
from pipeplan.sweeps.points import SweepAxes, SweepPoint, SweptQuestion, sweep_points
from pipeplan.sweeps.sweep import PointAnswer, solve_point, solve_points

ENDLESS = replace(SEARCH, time_limit_s=None)
STASHING = SweptQuestion({"schedule": "1f1b-stashing"})


def _cluster(servers: int = 3, inside: int = 2, memory: int = 1 << 30) -> Cluster:
    levels = (Level("server", inside, 1e10, 1e-6), Level("cluster", servers, 1e9, 1e-5))
    return Cluster("lab", Device("chip", "cuda", memory), levels)


def _uneven(layers: int, seed: int, scale: float = 1.0) -> Profile:
    """A chain whose layers, and so whose plans, are all different."""
    return long_chain(layers, seed=seed, spread=0.0, scale=scale)


def _answers(points: list[SweepPoint], settings: Settings) -> list[PointAnswer]:
    found: dict[int, PointAnswer] = {}
    assert solve_points(points, settings, 1, found.__setitem__)
    return [found[number] for number in range(len(points))]


RATES = [1e8 * factor for factor in (0.5, 1.5, 4, 30)]
GRIDS = SweptQuestion({"grid": True, "contention": False, "schedule": "1f1b-flush"}, batch=8)
MEMORY = [(1 << 20) * mebibytes for mebibytes in (3000, 1500, 900)]
SWEEPS: dict[str, tuple[Profile, list[Cluster], SweptQuestion, SweepAxes]] = {
    "bandwidth": (_uneven(6, 1, 30), [_cluster()], SweptQuestion(), SweepAxes({"cluster": RATES[1:]})),
    "both levels": (
        _uneven(6, 2, 60),
        [_cluster(2)],
        SweptQuestion(),
        SweepAxes({"cluster": RATES[:3], "server": [2e8, 1e10]}),
    ),
    "memory": (_uneven(6, 3, 100), [_cluster()], STASHING, SweepAxes({"cluster": [1e9]}, memory=MEMORY)),
    "servers and schedules": (
        _uneven(6, 4, 30),
        [_cluster(1), _cluster(2)],
        SweptQuestion(batch=8),
        SweepAxes({"cluster": RATES[1:3]}, schedules=["1f1b-flush", "gpipe", "2bw"]),
    ),
    "minibatches": (
        _uneven(6, 5, 30),
        [_cluster(2)],
        SweptQuestion(),
        SweepAxes({"cluster": RATES[::2]}, microbatch=[1, 2]),
    ),
    "grids without shared cards": (_uneven(8, 6, 30), [_cluster(2, 4)], GRIDS, SweepAxes({"cluster": RATES})),
}


@pytest.mark.parametrize("name", slow_but_for(["servers and schedules"], SWEEPS))
def test_every_point_is_answered_as_on_its_own(name: str) -> None:
    points = sweep_points(*SWEEPS[name])
    alone = [solve_point(point, ENDLESS) for point in points]
    assert _answers(points, ENDLESS) == alone
    assert len({answer.step_time_s for answer in alone}) > 1, "a sweep whose points are all alike tests nothing"


def test_the_points_of_a_sweep_cost_less_than_on_their_own() -> None:
    axes = SweepAxes({"cluster": RATES[1:]})
    points = sweep_points(_uneven(5, 1, 30), [_cluster(2)], STASHING, axes)
    alone = sum(calls_of(lambda point=point: solve_point(point, ENDLESS)) for point in points)  # type: ignore[misc]
    assert calls_of(lambda: _answers(points, ENDLESS)) < 0.8 * alone


def test_a_plan_that_meets_a_bound_is_proven_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing alone bounds the step time, with the faster links and with the slower ones."""
    problems = [
        Problem(_uneven(6, 1), variants.with_bandwidth(_cluster(2), 1, rate), Options()) for rate in (1e15, 1e14)
    ]
    cuts = enumerate_cuts(problems[0], 1000)
    own = dynamic_program.solve(problems[1], cuts)

    def searched(*arguments: object, **kinds: object) -> object:
        raise AssertionError

    with reusing():
        first = dynamic_program.solve(problems[0], cuts)
        assert first.objective_s == pytest.approx(own.objective_s, rel=1e-10)
        monkeypatch.setattr(dynamic_program, "_searched", searched)
        found = dynamic_program.solve(problems[1], cuts)
    assert found.status == Status.OPTIMAL
    assert found.plan == own.plan
    assert found.objective_s == pytest.approx(own.objective_s, rel=1e-12)


def test_a_bound_holds_on_clusters_that_are_no_better_and_others_do_not_compare() -> None:
    cluster = _cluster()
    assert is_no_better(cluster, cluster)
    latency = replace(cluster, levels=(*cluster.levels[:1], replace(cluster.levels[1], latency_s=2e-5)))
    for worse in (variants.with_bandwidth(cluster, 1, 5e8), variants.with_memory(cluster, 1 << 29), latency):
        assert is_no_better(worse, cluster)
        assert not is_no_better(cluster, worse)
    faster = variants.with_faster_devices(cluster, 2.0)
    mixed = variants.with_faster_links(variants.with_bandwidth(cluster, 0, 1e9), 1, 2.0)
    for other in (faster, mixed, _cluster(4), _cluster(6, 1)):
        assert not is_no_better(cluster, other)
        assert not is_no_better(other, cluster)

"""Workers that share a server's cores, and the optimiser's step: by hand, proven, checked, and replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checking import changed, findings, written
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.cluster_data.cluster_toml import cluster_toml, read_cluster
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.simulate import simulate
from pipeplan.util.files import Node

NO_OVERLAP = Options(overlap=0.0)
PLAIN = Settings(solver="dp", simulate=False)


def _profile(*times: tuple[float, float, float], size: int = 8) -> Profile:
    """A chain of layers by forward, backward and update time, with `size` bytes of weights each."""
    return chain([Layer(f"l{i}", *time[:2], size, 0, update_s=time[2]) for i, time in enumerate(times)], 1)


def _cluster(workers: int, cores: float, bandwidth: float = 1e9) -> Cluster:
    return Cluster("c", Device("d", "cpu", 1 << 30, cores=cores), (Level("server", workers, bandwidth),))


def _plan(*stages: tuple[str, int], depths: tuple[int, ...]) -> Plan:
    """Stages by the digits of their layers and their replicas, on workers from 0 on."""
    made, first = [], 0
    for (layers, replicas), depth in zip(stages, depths, strict=True):
        names = tuple(f"l{digit}" for digit in layers)
        made.append(Stage(names, tuple(range(first, first + replicas)), depth, depth))
        first += replicas
    return Plan(tuple(made))


def _replayed_s(plan: Plan, problem: Problem) -> float:
    steady = simulate(scenario_of_plan(plan, problem, evaluate(plan, problem))).report.steady
    assert steady is not None
    return steady.step_time_s


def test_three_workers_on_two_cores_take_what_all_compute_on_both() -> None:
    problem = Problem(_profile((1, 2, 0), (1, 2, 0), (2, 3, 0)), _cluster(3, 2), NO_OVERLAP)
    score = evaluate(_plan(("0", 1), ("1", 1), ("2", 1), depths=(5, 3, 1)), problem)
    assert score.alone_s == pytest.approx(5)
    assert score.step_time_s == pytest.approx((3 + 3 + 5) / 2)
    assert score.bound == "the 2 cores of server 0"
    # A stage that takes longer than all do on both cores has one for itself.
    uneven = evaluate(_plan(("0", 1), ("12", 1), depths=(3, 1)), problem)
    assert uneven.step_time_s == uneven.alone_s == pytest.approx(8)


def test_what_keeps_all_cores_busy_is_proven_best() -> None:
    problem = Problem(_profile(*[(1, 2, 0.25)] * 6), _cluster(3, 2), NO_OVERLAP)
    outcome = solve(problem)
    assert outcome.objective_s == pytest.approx(6 * 3.25 / 2)
    assert outcome.verdict.proven
    assert outcome.gap == pytest.approx(0, abs=1e-9)
    document = written(outcome)
    assert all(found.holds for found in findings(document, problem.profile).values())
    # The same plan where the cores are said to be one more: what it states is then wrong.
    forged = changed(document, lambda d: d["prediction"].update(minibatch_s=outcome.evaluation.alone_s))
    assert findings(forged, problem.profile)["formulas"].holds is False


def test_the_replay_shares_the_cores() -> None:
    """Two workers on 1.6 cores that were measured with both busy take 3 s each, and 3 / 0.8 s if measured alone."""
    for stages in (3, 2):
        options = replace(NO_OVERLAP, stages=stages)
        problem = Problem(_profile(*[(1, 2, 0.5)] * 6, size=0), _cluster(3, 2), options)
        outcome = solve(problem, PLAIN)
        assert _replayed_s(outcome.plan, problem) == pytest.approx(outcome.objective_s, rel=0.01)
    profile = _profile((1, 2, 0), (1, 2, 0), size=0)
    for busy, step_time_s in ((2, 3.0), (1, 3 / 0.8)):
        measured = replace(profile, provenance=replace(profile.provenance, processes=busy))
        problem = Problem(measured, _cluster(3, 1.6), NO_OVERLAP)
        assert _replayed_s(_plan(("0", 1), ("1", 1), depths=(3, 1)), problem) == pytest.approx(step_time_s)


def test_cores_are_written_and_read(tmp_path: Path) -> None:
    cluster, path = _cluster(3, 2), tmp_path / "c.toml"
    path.write_text(cluster_toml(cluster))
    assert read_cluster(path) == cluster
    assert cluster_from_json(Node(cluster.to_json(), "c")) == cluster
    assert "cores" not in _cluster(3, 0).to_json()["device"]
    path.write_text(cluster_toml(cluster).replace("cores = 2", "cores = 0"))
    with pytest.raises(InputError, match="cores"):
        read_cluster(path)

"""Plans of one machine are charged the times of their number of workers, and one worker alone may be as fast."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import pipeplan
from pipeplan.cluster_data import machine_costs
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cluster_data.machine_costs import IdleCores, MachineCosts, as_charged
from pipeplan.from_options.build_problem import build_problem
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.plan_profile import profile_of_plan
from pipeplan.profile_data.layers import Layer, Provenance, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.plan_json import plan_document
from pipeplan.sweeps.points import SweepAxes, sweep_points
from pipeplan.util.files import Node

DP = Settings(solver="dp", simulate=False, compare=False)


def machine(workers: int, **device: float) -> Cluster:
    found = Device("cpu", "cpu", 2**40, **device)  # type: ignore[arg-type]
    return Cluster("local", found, (Level("server", workers, 1e12),))


def profile(slower: float, layers: int = 4) -> Profile:
    """Equal layers of 3 ms that take `slower` times as long with both of two cores busy."""
    made = tuple(
        Layer(f"l{i}", 1e-3, 2e-3, 4, 4, loaded_forward_s=slower * 1e-3, loaded_backward_s=slower * 2e-3)
        for i in range(layers)
    )
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), 4, 4) for i in range(layers - 1))
    return Profile(made, tensors, 8, provenance=Provenance(device="cpu", load_processes=2))


ASYNCHRONOUS = {"schedule": "1f1b-stashing", "max_replicas": 1}


def test_two_workers_are_charged_what_layers_take_under_load() -> None:
    built = build_problem(profile(1.25), machine(2), **ASYNCHRONOUS)
    outcome = solve(built.problem, DP)
    assert built.one_worker is None
    assert outcome.plan.config == "1-1"
    assert outcome.objective_s == pytest.approx(2 * 3e-3 * 1.25)


def test_one_worker_is_charged_what_they_take_alone() -> None:
    for workers, options in ((1, {}), (2, {"max_workers": 1})):
        built = build_problem(profile(1.25), machine(workers), **ASYNCHRONOUS, **options)
        assert built.one_worker is None
        assert solve(built.problem, DP).objective_s == pytest.approx(4 * 3e-3)


@pytest.mark.parametrize(("slower", "alone"), [(1.9, False), (2.1, True)])
def test_one_worker_is_taken_where_two_are_no_faster(slower: float, alone: bool) -> None:
    """Two workers take half the layers each, so that they gain unless layers take twice as long beside each other."""
    built = build_problem(profile(slower), machine(2), **ASYNCHRONOUS)
    outcome = solve(built.problem, DP)
    assert (built.one_worker is not None) == alone
    assert outcome.plan.busy == (1 if alone else 2)
    assert outcome.objective_s == pytest.approx(4 * 3e-3 if alone else 2 * 3e-3 * slower)


@pytest.mark.parametrize("slower", [1.9, 2.1])
def test_the_plan_by_which_one_worker_was_compared_is_not_searched_for_again(slower: float) -> None:
    built = build_problem(profile(slower), machine(2), **ASYNCHRONOUS)
    outcome = solve(built.problem, DP)
    assert built.known == (outcome.plan,)
    assert solve(built.problem, DP, known=built.known).plan == outcome.plan


def test_a_pipeline_has_to_be_worth_its_trouble() -> None:
    """By what makes plans simple (5%), and an asynchronous one by what is asked for (10%)."""
    assert build_problem(profile(1.94), machine(2), **ASYNCHRONOUS).one_worker is None
    assert build_problem(profile(1.94), machine(2), simplest=0.02, **ASYNCHRONOUS).one_worker is not None
    for slower, alone in ((1.7, False), (1.85, True)):
        built = build_problem(profile(slower), machine(2), max_replicas=1, staleness="any")
        assert (built.one_worker is not None) == alone
        if built.one_worker is not None:
            assert built.synchrony is not None
            assert built.one_worker.text in built.synchrony.reason
            assert built.one_worker.workers == 2


def test_two_stages_that_are_asked_for_are_two() -> None:
    assert build_problem(profile(3.0), machine(2), stages=2, **ASYNCHRONOUS).one_worker is None
    assert build_problem(profile(3.0), machine(2), pins=(("l3", 2),), **ASYNCHRONOUS).one_worker is None


def test_the_loaded_layer_decides_where_to_cut() -> None:
    """A layer that other workers slow down more than the rest has a stage with fewer others."""
    even = profile(1.0)
    first = replace(even.layers[0], loaded_forward_s=3e-3, loaded_backward_s=6e-3)
    skewed = replace(even, layers=(first, *even.layers[1:]))
    cuts = [
        len(solve(build_problem(one, machine(2), **ASYNCHRONOUS).problem, DP).plan.stages[0].layers)
        for one in (even, skewed)
    ]
    assert cuts == [2, 1]


def test_servers_of_a_network_have_the_times_alone() -> None:
    apart = Cluster("lab", Device("cpu", "cpu", 2**40), (Level("server", 1, 1e12), Level("network", 2, 1e12)))
    built = build_problem(profile(1.5), apart, **ASYNCHRONOUS)
    assert solve(built.problem, DP).objective_s == pytest.approx(2 * 3e-3)


def test_the_profile_of_the_plan_is_found_again(tmp_path: Path) -> None:
    profile(1.25).save(tmp_path / "profile.json")
    built = build_problem(Profile.load(tmp_path / "profile.json"), machine(2), **ASYNCHRONOUS)
    outcome = solve(built.problem, DP)
    document = json.loads(json.dumps(plan_document(outcome)))
    assert document["profile"]["processes"] == 2
    found = profile_of_plan(Node(document, "plan.json"), tmp_path / "plan" / "plan.json")
    assert found.digest() == document["profile"]["digest"] == outcome.problem.profile.digest()
    assert pipeplan.solve(Profile.load(tmp_path / "profile.json"), machine(2), **ASYNCHRONOUS).plan == outcome.plan


def test_a_sweep_has_the_times_of_each_cluster() -> None:
    points = sweep_points(
        profile(1.5), [machine(1), machine(2)], build_problem(profile(1.5), machine(1)).problem.options, SweepAxes()
    )
    assert [point.profile.total_s for point in points] == [pytest.approx(12e-3), pytest.approx(18e-3)]


def test_loaded_layers_share_the_part_of_the_cores_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What workers take from each other is in the layers; that cores are idle at times, with three on two, is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(machine_costs.SWITCH, "on")
    work_s = sum(layer.loaded_forward_s + layer.loaded_backward_s for layer in profile(1.5).layers) / 3 + 2e-4
    idle = IdleCores(2, 0.2, work_s / 4)
    machine_costs.save(MachineCosts(ExecutorCosts(pass_s=1e-4), {1: 1.0, 2: 1.6, 3: 1.5}, "noon", idle=idle))
    for workers, cores in ((2, 0), (3, 1.8)):
        measured = machine_costs.with_machine_costs(machine(workers))
        assert measured.device.cores == {2: 1.6, 3: 1.2}[workers], "of a minibatch whose work is not known"
        charged, cluster = as_charged(profile(1.5), measured, workers)
        assert charged.provenance.processes == 2
        assert cluster.device.cores == cores
    unloaded = as_charged(profile(1.5).without_load(), measured, 3)[1]
    assert unloaded.device.cores == pytest.approx(1.5 * 0.8785, abs=1e-3), "such layers are slowed down by others, too"


def test_every_stage_is_charged_what_a_step_takes_whatever_its_parameters_are() -> None:
    plain = replace(profile(1.0), step_s=5e-4)
    built = build_problem(plain, machine(2), **ASYNCHRONOUS)
    outcome = solve(built.problem, DP)
    assert outcome.objective_s == pytest.approx(2 * 3e-3 + 5e-4)
    assert [stage.executor_s for stage in outcome.evaluation.stages] == [pytest.approx(5e-4)] * 2
    flushed = build_problem(plain, machine(1), schedule="gpipe", accumulate=4)
    assert solve(flushed.problem, DP).objective_s == pytest.approx(4 * 3e-3 + 5e-4 / 4)

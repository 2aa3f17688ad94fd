"""Loads of network cards, ports and shared cores, by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from checking import changed, findings, written
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.simulate import simulate

DEVICE = Device("d", "cpu", 1 << 40)
OUT, IN = contention.OUTGOING, contention.INCOMING


def _profile(layers: int, seed: int = 0, work_s: float = 1.0) -> Profile:
    rng = random.Random(seed)
    tensors = [
        Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), rng.randint(1, 50), rng.randint(1, 50)) for i in range(layers - 1)
    ]
    if layers > 2:
        tensors.append(Tensor("skip", "l0", (f"l{layers - 1}",), 7, 3))
    made = tuple(Layer(f"l{i}", work_s, 2 * work_s, rng.randint(0, 100), 0) for i in range(layers))
    return Profile(made, tuple(tensors), 1)


def _uniform(*counts: int, **efficiencies: float) -> Cluster:
    rates = (40.0, 10.0, 3.0)
    return Cluster("t", DEVICE, tuple(Level(f"n{k}", n, rates[k], **efficiencies) for k, n in enumerate(counts)))


def _loads(plan: Plan, problem: Problem) -> contention.CardLoads:
    return contention.card_loads(plan, problem, Links.of(problem.cluster))


def test_a_shared_card_bounds_the_step_time() -> None:
    problem = Problem(_profile(3, work_s=1e-3), _uniform(1, 4), Options(memory=False))
    # Straight: the middle worker's card has to send activations on and gradients back.
    plan = Plan(tuple(Stage((f"l{i}",), (i,), 100 ** (2 - i), 1) for i in range(3)))
    score = evaluate(plan, problem)
    assert score.step_time_s > score.alone_s
    assert score.step_time_s == pytest.approx(_loads(plan, problem).busiest()[0])
    assert score.bound == "network card of n0 1, outgoing"
    without = evaluate(plan, replace(problem, options=Options(memory=False, contention=False)))
    assert without.step_time_s == without.alone_s == score.alone_s
    assert without.bound != score.bound


@pytest.mark.parametrize("overlap", [1.0, 0.5, 0.0])
def test_plain_data_parallelism_waits_for_its_update(overlap: float) -> None:
    """Backward takes 1 s for c, 1 for b and 4 for a; their buckets of 2, 30 and 8 MiB travel for 0.5, 7.5 and 2 s.

    c's is full at 1 and through at 1.5, b's is full at 2 and through at 9.5, a's is full at 6 and through at 11.5.
    """
    mib = 2**20
    layers = [Layer("a", 1.0, 4.0, 8 * mib, 0), Layer("b", 1.0, 1.0, 30 * mib, 0), Layer("c", 1.0, 1.0, 2 * mib, 0)]
    layers[2] = replace(layers[2], update_s=1.0)
    cluster = Cluster("t", Device("d", "cuda", 2**40), (Level("server", 4, 6.0 * mib),))
    plan = Plan((Stage(("a", "b", "c"), (0, 1, 2, 3), 1, 1),))
    score = evaluate(plan, Problem(chain(layers, 1), cluster, Options(overlap=overlap)))
    assert score.step_time_s == pytest.approx((3 + 6 + 1 + {1.0: 5.5, 0.5: 5.5 + 2.25, 0.0: 10}[overlap]) / 4)
    assert score.alone_s == pytest.approx({1.0: 10, 0.5: 15, 0.0: 20}[overlap] / 4)


def test_large_clusters_add_up() -> None:
    """8,191 and 8,192 replicas meet in 67 million pairs; nothing is lost between a card and the next."""
    cluster = _uniform(8, 32, 64)
    problem = Problem(_profile(2), cluster)
    plan = Plan((Stage(("l0",), tuple(range(8191)), 1, 1), Stage(("l1",), tuple(range(8191, 16383)), 1, 1)))
    cards = _loads(plan, problem)
    (tensor,) = problem.profile.tensors
    sizes = [layer.parameter_bytes for layer in problem.profile.layers]
    hops = [2 * (r - 1) / r * size / r for r, size in zip((8191, 8192), sizes, strict=True)]
    everything = tensor.bytes + tensor.gradient_bytes + 8191 * hops[0] + 8192 * hops[1]
    for times in cards.busy_s:
        assert float(times[OUT].sum()) == pytest.approx(float(times[IN].sum()))
    assert float(cards.busy_s[0][OUT].sum()) * 40.0 == pytest.approx(everything)
    assert np.all(cards.busy_s[0][:, 16383] == 0)


# Cores that workers share.

NO_OVERLAP = Options(overlap=0.0)
PLAIN = Settings(solver="dp", simulate=False)


def _timed(*times: tuple[float, float, float], size: int = 8) -> Profile:
    """A chain of layers by forward, backward and update time, with `size` bytes of weights each."""
    return chain([Layer(f"l{i}", *time[:2], size, 0, update_s=time[2]) for i, time in enumerate(times)], 1)


def _sharing(workers: int, cores: float, bandwidth: float = 1e9) -> Cluster:
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
    return steady.step_time_s


def test_three_workers_on_two_cores_take_what_all_compute_on_both() -> None:
    problem = Problem(_timed((1, 2, 0), (1, 2, 0), (2, 3, 0)), _sharing(3, 2), NO_OVERLAP)
    score = evaluate(_plan(("0", 1), ("1", 1), ("2", 1), depths=(5, 3, 1)), problem)
    assert score.alone_s == pytest.approx(5)
    assert score.step_time_s == pytest.approx((3 + 3 + 5) / 2)
    assert score.bound == "the 2 cores of server 0"
    # A stage that takes longer than all do on both cores has one for itself.
    uneven = evaluate(_plan(("0", 1), ("12", 1), depths=(3, 1)), problem)
    assert uneven.step_time_s == uneven.alone_s == pytest.approx(8)


def test_what_keeps_all_cores_busy_is_proven_best() -> None:
    problem = Problem(_timed(*[(1, 2, 0.25)] * 6), _sharing(3, 2), NO_OVERLAP)
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
        problem = Problem(_timed(*[(1, 2, 0.5)] * 6, size=0), _sharing(3, 2), options)
        outcome = solve(problem, PLAIN)
        assert _replayed_s(outcome.plan, problem) == pytest.approx(outcome.objective_s, rel=0.01)
    profile = _timed((1, 2, 0), (1, 2, 0), size=0)
    for busy, step_time_s in ((2, 3.0), (1, 3 / 0.8)):
        measured = replace(profile, provenance=replace(profile.provenance, processes=busy))
        problem = Problem(measured, _sharing(3, 1.6), NO_OVERLAP)
        assert _replayed_s(_plan(("0", 1), ("1", 1), depths=(3, 1)), problem) == pytest.approx(step_time_s)

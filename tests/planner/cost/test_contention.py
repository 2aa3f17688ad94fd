"""Loads of network cards, ports and shared cores, against a count of every message and every hop, and by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from checking import changed, findings, written
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
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


def _uneven() -> Cluster:
    inside = [Level("server", 3, 40.0), Level("server", 2, 30.0), Level("server", 1, 0.0)]
    machines = [Server(DEVICE, level, card) for level, card in zip(inside, (0.0, 5.0, 2.0), strict=True)]
    return Cluster.of_servers("t", machines, [Level("cluster", 3, 10.0, sendrecv_efficiency=0.5)])


def _loads(plan: Plan, problem: Problem) -> contention.CardLoads:
    return contention.card_loads(plan, problem, Links.of(problem.cluster))


def _counted(plan: Plan, problem: Problem) -> dict[tuple[int, int, int], float]:
    """Seconds per minibatch by (level, direction, component), from every message and hop of enough minibatches."""
    cluster, total = problem.cluster, defaultdict(float)
    bandwidth: dict[tuple[int, int], tuple[float, float]] = {}
    for level in range(len(cluster.levels)):
        for number, start in enumerate(list(cluster.starts(level))[:-1]):
            bandwidth[level, number] = Links.of(cluster).card(level, start)

    def carry(source: int, target: int, size: float, reduces: bool) -> None:
        for level in range(len(cluster.levels)):
            ends = cluster.component(level, source), cluster.component(level, target)
            if ends[0] != ends[1]:
                total[level, OUT, ends[0]] += size / bandwidth[level, ends[0]][reduces]
                total[level, IN, ends[1]] += size / bandwidth[level, ends[1]][reduces]

    def ring(members: tuple[int, ...], size: float) -> None:
        for source, target in zip(members, members[1:] + members[:1], strict=True):
            if len(members) > 1:
                carry(source, target, 2 * (len(members) - 1) / len(members) * size, True)

    count = math.lcm(*(stage.replicas for stage in plan.stages)) * (plan.accumulate or 1)
    for minibatch in range(count):
        at = [stage.workers[minibatch % stage.replicas] for stage in plan.stages]
        for index in range(len(at) - 1):
            before = {name for stage in plan.stages[: index + 1] for name in stage.layers}
            for tensor in problem.profile.tensors:
                if tensor.producer in before and not before.issuperset(tensor.consumers):
                    carry(at[index], at[index + 1], tensor.bytes, False)
                    if not plan.inference:
                        carry(at[index + 1], at[index], tensor.gradient_bytes, False)
    for stage in plan.stages if not plan.inference else ():
        size = sum(layer.parameter_bytes for layer in problem.profile.layers if layer.name in stage.layers)
        replicas = stage.replicas // plan.copies
        for copy in range(plan.copies):
            for _ in range(count // (plan.accumulate or stage.replicas)):
                ring(stage.workers[copy :: plan.copies], size)
        for replica in range(replicas):
            for _ in range(count // (plan.accumulate or plan.copies)):
                ring(stage.workers[replica * plan.copies : (replica + 1) * plan.copies], size / replicas)
    return {card: seconds / count for card, seconds in total.items()}


def _agrees_with_the_count(plan: Plan, problem: Problem) -> None:
    expected, cards = _counted(plan, problem), _loads(plan, problem)
    for level, times in enumerate(cards.busy_s):
        for direction, component in itertools.product((OUT, IN), range(times.shape[1])):
            assert times[direction, component] == pytest.approx(expected.get((level, direction, component), 0.0))
    assert cards.busiest()[0] == pytest.approx(max(expected.values(), default=0.0))


def _random_plan(rng: random.Random, problem: Problem, copies: int, **fields: object) -> Plan:
    """Stages on any workers at all, in any order."""
    layers, size = [layer.name for layer in problem.profile.layers], problem.cluster.workers // copies
    count = rng.randint(1, min(3, len(layers), size))
    cuts = [0, *sorted(rng.sample(range(1, len(layers)), count - 1)), len(layers)]
    ends = [0, *sorted(rng.sample(range(1, size + 1), count))]
    order = rng.sample(range(size), size)
    stages = []
    for index in range(count):
        mine = order[ends[index] : ends[index + 1]]
        workers = tuple(copy * size + worker for worker in mine for copy in range(copies))
        stages.append(Stage(tuple(layers[cuts[index] : cuts[index + 1]]), workers, 1, 1))
    return Plan(tuple(stages), copies, **fields)


def test_loads_are_what_a_count_of_all_messages_gives() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        shapes = [(6,), (3, 2), (2, 3), (2, 2, 2), (1, 4)]
        cluster = rng.choice([*(_uniform(*shape) for shape in shapes), _uneven()])
        cluster = rng.choice([cluster, _uniform(2, 3, allreduce_efficiency=0.5, sendrecv_efficiency=0.8)])
        problem = Problem(_profile(rng.randint(3, 5), seed), cluster)
        copies = 2 if cluster.uniform and cluster.workers % 2 == 0 and rng.random() < 0.4 else 1
        _agrees_with_the_count(_random_plan(rng, problem, copies), problem)
    # Schedules that accumulate reduce less often, and inference sends activations only.
    for seed, fields in ((3, {"schedule": "2bw", "accumulate": 12}), (5, {"inference": True})):
        problem = Problem(_profile(4), _uniform(2, 3), Options(**fields))
        _agrees_with_the_count(_random_plan(random.Random(seed), problem, 1, **fields), problem)


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

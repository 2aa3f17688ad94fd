"""Calibrating by runs whose layers' true times, links and bubbles are known."""

from __future__ import annotations

import itertools
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import chain, cluster

from pipeplan.calibration.calibrate import Calibrated, calibrate
from pipeplan.calibration.measured_stages import BusyTimes, ObservedRun, transfers_s
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Size
from pipeplan.profile_data.profile import Profile


def plan_of(profile: Profile, cuts: list[int], replicas: list[int], depths: list[int] | None = None) -> Plan:
    """Stages of consecutive layers, that begin at 0 and at the cuts."""
    names, first, stages = [layer.name for layer in profile.layers], 0, []
    ends = [*cuts, len(names)]
    for index, (start, end, count) in enumerate(zip([0, *cuts], ends, replicas, strict=True)):
        depth = depths[index] if depths else 2 * (len(replicas) - index) - 1
        stages.append(Stage(tuple(names[start:end]), tuple(range(first, first + count)), depth, depth))
        first += count
    return Plan(tuple(stages))


def observed(plan: Plan, step_time_s: float, *stages: BusyTimes, overlap: float = 0.0, **options: Any) -> ObservedRun:
    shares = (1.0,) * len(stages)
    return ObservedRun("run", plan, Options(overlap=overlap, **options), step_time_s, 1.0, 50, stages, shares)


def sums(profile: Profile, stage: Stage) -> tuple[float, ...]:
    own = [layer for layer in profile.layers if layer.name in stage.layers]
    return tuple(sum(getattr(one, what) for one in own) for what in ("forward_s", "backward_s", "update_s"))


def busy(times: tuple[float, ...], **more: float) -> BusyTimes:
    forward, backward, update = times
    return BusyTimes(forward, backward, update, **({"sync_s": 0.0, "load_s": 0.0, "own_s": 0.0} | more))


def test_a_profile_that_is_off_by_a_factor_a_stage_is_put_right() -> None:
    """Then every plan is predicted as with the true times, which the run never showed layer by layer."""
    true = chain([(0.1, 0.2, 0.01), (0.3, 0.1, 0.02), (0.2, 0.4, 0.03), (0.1, 0.3, 0.04)])
    plan = plan_of(true, [2], [1, 1])
    factors = [(1.3, 0.7, 2.0)] * 2 + [(0.5, 1.1, 3.0)] * 2
    wrong = chain(
        [
            (layer.forward_s / f, layer.backward_s / b, layer.update_s / u)
            for layer, (f, b, u) in zip(true.layers, factors, strict=True)
        ]
    )
    here = cluster(2)
    step_time = evaluate(plan, Problem(true, here, Options(overlap=0.0))).step_time_s
    found = calibrate([observed(plan, step_time, *(busy(sums(true, one)) for one in plan.stages))], wrong, here)
    assert found.slack == pytest.approx(1.0)
    for new, old in zip(found.profile.layers, true.layers, strict=True):
        for what in ("forward_s", "backward_s", "update_s"):
            assert getattr(new, what) == pytest.approx(getattr(old, what))
    other = plan_of(true, [1, 3], [1, 1, 1])
    problems = (Problem(one, cluster(3), Options(overlap=0.0)) for one in (found.profile, true))
    new_step_time, true_step_time = (evaluate(other, problem).step_time_s for problem in problems)
    assert new_step_time == pytest.approx(true_step_time)


@pytest.mark.parametrize("seed", range(12))
def test_what_ran_is_predicted_as_it_was_measured(seed: int) -> None:
    """Whatever keeps the workers busy, and however long they wait."""
    rng = random.Random(seed)
    times = [tuple(rng.uniform(0.01, 0.5) for _ in range(3)) for _ in range(rng.randint(2, 6))]
    profile = chain(times, parameters=rng.choice([0, 2000]))  # type: ignore[arg-type]
    count = rng.randint(1, min(3, len(times)))
    replicas = [rng.randint(1, 3) for _ in range(count)]
    cuts = sorted(rng.sample(range(1, len(times)), count - 1))
    plan = plan_of(profile, cuts, replicas, [400, 40, 1][-count:])
    stages = [
        BusyTimes(*(rng.uniform(0.1, 0.5) for _ in range(3)), rng.uniform(0, 0.1) if r > 1 else 0.0, 0.02, 0.03)
        for r in replicas
    ]
    overlap = rng.choice([0.0, 0.5, 1.0])
    busiest = max(one.total_s / r for one, r in zip(stages, replicas, strict=True))
    run = observed(plan, busiest * rng.uniform(1.0, 1.4), *stages, overlap=overlap)
    found = calibrate([run], profile, cluster(sum(replicas)))
    assert not found.unexplained
    assert found.step_times_s[0] == pytest.approx(run.step_time_s)
    problem = Problem(found.profile, found.cluster, Options(overlap=overlap))
    assert evaluate(plan, problem).step_time_s == pytest.approx(run.step_time_s)


def test_other_minibatch_sizes_change_by_the_same_factors() -> None:
    profile = chain([(0.1, 0.2, 0.01), (0.1, 0.2, 0.01)])
    others = tuple(replace(one, forward_s=0.15, backward_s=0.3, update_s=0.5) for one in profile.layers)
    size = Size(8, others, profile.tensors)
    run = observed(plan_of(profile, [], [1]), 0.96, busy((0.3, 0.6, 0.06)))
    found = calibrate([run], replace(profile, sizes=(size,)), cluster(1)).profile
    layer = found.sizes[0].layers[0]
    assert (layer.forward_s, layer.backward_s) == pytest.approx((0.225, 0.45))
    assert layer.update_s == found.layers[0].update_s == pytest.approx(0.03), "a step does not depend on the minibatch"


def ring_s(replicas: int, size: float, rate: float) -> float:
    """2 (r-1)/r of the bytes over each link (Patarasuk and Yuan)."""
    return 2 * (replicas - 1) / replicas * size / rate


Times = list[tuple[float, float, float]]
HAND: dict[str, tuple[Times, list[int], float, list[BusyTimes], Times, dict[str, Any]]] = {
    "time in which nobody is busy stretches all layers alike": (
        *([(0.1, 0.2, 0.0), (0.1, 0.1, 0.0)], [1], 0.36, [busy((0.1, 0.2, 0.0)), busy((0.1, 0.1, 0.0))]),
        *([(0.12, 0.24, 0.0), (0.12, 0.12, 0.0)], {}),
    ),
    "reading samples goes with the first layer, and the rest is spread": (
        *([(0.1, 0.3, 0.0)] * 2, [], 1.0, [busy((0.2, 0.6, 0.0), load_s=0.04, own_s=0.16)]),
        *([(0.16, 0.36, 0.0), (0.12, 0.36, 0.0)], {}),
    ),
    "the stage with the loss reads the targets": (
        *([(0.1, 0.3, 0.0)] * 4, [2], 0.85, [busy((0.2, 0.6, 0.0), load_s=0.05)] * 2),
        *([(0.15, 0.3, 0.0), (0.1, 0.3, 0.0), (0.1, 0.3, 0.0), (0.15, 0.3, 0.0)], {}),
    ),
    "steps are spread by parameters where the profile says nothing of them": (
        *([(0.1, 0.2, 0.0)] * 2, [], 0.64, [busy((0.2, 0.4, 0.04))]),
        *([(0.1, 0.2, 0.03), (0.1, 0.2, 0.01)], {"parameters": (3000, 1000)}),
    ),
    "eight minibatches an update were measured with an eighth of its step each": (
        *([(0.1, 0.2, 0.1)], [], 0.35, [busy((0.1, 0.2, 0.05))]),
        *([(0.1, 0.2, 0.4)], {"schedule": "1f1b-flush", "accumulate": 8}),
    ),
    "a stage that recomputes runs forward twice": (
        *([(0.1, 0.1, 0.0)], [], 0.7, [busy((0.2, 0.5, 0.0))]),
        *([(0.2, 0.3, 0.0)], {"recompute": True}),
    ),
    "inference says nothing of backward passes": (
        *([(0.1, 0.2, 0.05)] * 2, [1], 0.33, [busy((0.2, 0.0, 0.0)), busy((0.3, 0.0, 0.0))]),
        *([(0.22, 0.2, 0.05), (0.33, 0.2, 0.05)], {"inference": True}),
    ),
}
"""Times of layers, cuts, the measured step time, what kept each stage busy, the new times, and what is special."""


@pytest.mark.parametrize("rule", HAND)
def test_layers_get_the_times_that_are_worked_out_by_hand(rule: str) -> None:
    times, cuts, step_time_s, stages, expected, more = HAND[rule]
    profile, options = chain(times), dict(more)
    if sizes := options.pop("parameters", ()):
        layers = [replace(one, parameter_bytes=size) for one, size in zip(profile.layers, sizes, strict=True)]
        profile = replace(profile, layers=tuple(layers))
    plan = plan_of(profile, cuts, [1] * len(stages), [1] * len(stages) if "inference" in options else None)
    if options.pop("recompute", False):
        plan = replace(plan, stages=(replace(plan.stages[0], recompute=True),))
    plan = replace(plan, **options)
    found = calibrate([observed(plan, step_time_s, *stages, **options)], profile, cluster(len(stages)))
    new = [(one.forward_s, one.backward_s, one.update_s) for one in found.profile.layers]
    assert new == [pytest.approx(one) for one in expected]


def test_several_runs_are_averaged_if_all_trained() -> None:
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)])
    plans = [plan_of(profile, [], [1]), plan_of(profile, [1], [1, 1])]
    both = [
        observed(plans[0], 0.6, busy((0.2, 0.4, 0.0))),
        observed(plans[1], 0.6, busy((0.1, 0.2, 0.0)), busy((0.2, 0.4, 0.0))),
    ]
    found = calibrate(both, profile, cluster(2))
    assert [one.forward_s / found.slack for one in found.profile.layers] == pytest.approx([0.1, 0.15])
    only = observed(replace(plans[0], inference=True), 0.2, busy((0.2, 0.0, 0.0)), inference=True)
    with pytest.raises(InputError, match="some of these runs trained and others did not"):
        calibrate([only, both[0]], profile, cluster(2))


def twenty_layers(share: float, overlap: float, held: float, *, recompute: bool = False) -> Calibrated:
    """Data parallelism on two workers: 20 layers of 10 MiB, a backward pass of 1 s, an all-reduce that takes a `share`
    of it at half of the bandwidth and holds a worker up for `held` s. The profile is off by a third, and the cluster by
    its own."""
    true = chain([(0.025, 0.05, 0.001)] * 20, parameters=10 * 2**20)
    layers = tuple(replace(one, forward_s=one.forward_s / 1.5, backward_s=one.backward_s / 1.5) for one in true.layers)
    plan = plan_of(true, [], [2])
    plan = replace(plan, stages=(replace(plan.stages[0], recompute=recompute),))
    backward = 1.5 if recompute else 1.0
    run = observed(plan, (0.52 + backward + held) / 2, busy((0.5, backward, 0.02), sync_s=held), overlap=overlap)
    here = cluster(2, bandwidth=200 * 2**20 / share / 0.5, efficiency=0.4)
    return calibrate([run], replace(true, layers=layers), here)


HELD = (
    # Buckets: layer 20, then three at a time, then layer 1. Those of layers 2 to 4 leave 5% before the end.
    (0.6, 1.0, 3 * 0.03 - 0.05 + 0.03),
    (0.6, 0.5, 0.07 + 0.5 * (0.6 - 0.07)),  # half of the rest is hidden
    (0.6, 0.0, 0.6),
    # From the second bucket on, full at 20%, the link is never idle.
    (2.0, 1.0, 0.2 + 19 * 0.1 - 1.0),
)
"""The share of the backward pass that an all-reduce takes, the overlap, and what it holds a worker up for."""


def test_what_the_backward_pass_hides_is_part_of_an_all_reduce() -> None:
    for (share, overlap, held), recompute in itertools.product(HELD, (False, True)):
        found = twenty_layers(share, overlap, held, recompute=recompute)
        assert found.cluster.levels[0].allreduce_efficiency == pytest.approx(0.5, rel=1e-6)
        assert found.slack == pytest.approx(1.0)
        for layer in found.profile.layers:
            assert (layer.forward_s, layer.backward_s) == pytest.approx((0.025, 0.05))


def test_an_efficiency_that_cannot_be_told_stays() -> None:
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)])
    for replicas, overlap, copies, why in (
        ([2, 1], 0.0, 1, "updates run late"),
        ([2], 1.0, 1, "hide behind computing"),
        ([2], 0.0, 2, "inside copies of the pipeline and among them"),
        ([1, 1], 0.0, 1, "no stage had replicas"),
    ):
        plan = replace(plan_of(profile, [1][: len(replicas) - 1], replicas), copies=copies)
        stages = [busy(sums(profile, one), sync_s=0.001 if one.replicas > 1 else 0.0) for one in plan.stages]
        found = calibrate([observed(plan, 0.4, *stages, overlap=overlap)], profile, cluster(sum(replicas)))
        assert found.cluster.levels[0].allreduce_efficiency == 0.5
        assert why in next(one.why for one in found.fitted if one.operation == "all-reduce")
    # An all-reduce of 20% of the pass hides but for the last bucket, of 1%, which any pass is off by.
    for held in (0.0, 0.01, 0.015):
        found = twenty_layers(0.2, 1.0, held)
        assert found.cluster.levels[0].allreduce_efficiency == 0.4
        assert "too short to tell" in found.fitted[0].why


def test_a_boundary_that_bounds_the_step_time_says_what_it_reaches() -> None:
    """8 bytes a minibatch: at 16 bytes/s and half of it 1 s; 2 s were measured, with 0.3 s of work."""
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)])
    plan = plan_of(profile, [1], [1, 1], [9, 1])
    run = observed(plan, 2.0, *(busy(sums(profile, one)) for one in plan.stages))
    found = calibrate([run], profile, cluster(2, bandwidth=16.0))
    assert found.cluster.levels[0].sendrecv_efficiency == pytest.approx(0.25)
    assert found.slack == pytest.approx(1.0)
    assert found.step_times_s[0] == pytest.approx(2.0)
    # In two copies each boundary carries every other minibatch: 0.5 s, where 1.6 s of work take 0.8 s.
    slow = chain([(0.6, 1.0, 0.0)] * 2, parameters=0)
    stages = tuple(replace(one, workers=(index, index + 2)) for index, one in enumerate(plan.stages))
    copied = replace(plan, stages=stages, copies=2)
    run = observed(copied, 1.0, *(busy(sums(slow, one)) for one in stages))
    assert calibrate([run], slow, cluster(4, bandwidth=16.0)).cluster.levels[0].sendrecv_efficiency == 0.5


def test_where_cores_are_shared_only_computing_counts() -> None:
    """Three workers on two cores: the step time is all that they compute over two."""
    profile = chain([(0.1, 0.2, 0.0)] * 3)
    plan = plan_of(profile, [1, 2], [1, 1, 1], [20, 9, 1])
    run = replace(observed(plan, 0.5, *(busy((0.1, 0.2, 0.0)) for _ in range(3))), shares=(0.6,) * 3, shared=True)
    found = calibrate([run], profile, cluster(3, cores=2))
    assert found.slack == pytest.approx(0.5 / (3 * 0.3 / 2))


def test_metrics_that_are_no_file_or_endless_are_passed_over(tmp_path: Path) -> None:
    plan = plan_of(chain([(0.1, 0.2, 0.0)]), [], [3])
    (tmp_path / "metrics").mkdir()
    os.mkfifo(tmp_path / "metrics" / "rank-0.jsonl")
    (tmp_path / "metrics" / "rank-1.jsonl").symlink_to("/dev/zero")
    with (tmp_path / "metrics" / "rank-2.jsonl").open("wb") as file:
        file.truncate(1 << 22)
    assert transfers_s(tmp_path, plan) == (None,)


def test_waiting_for_slower_replicas_is_no_links_doing(tmp_path: Path) -> None:
    """Two replicas, and at every update one of them waits 50 ms for the other, which then waits 10 ms for the bytes."""
    profile = chain([(0.1, 0.2, 0.0), (0.1, 0.2, 0.0)])
    plan = plan_of(profile, [], [2])
    (tmp_path / "metrics").mkdir()
    for rank in range(2):
        lines = [
            {"epoch": 0, "minibatch": 2 * group + rank, "sync_s": 0.06 if group % 2 == rank else 0.01}
            for group in range(9)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"epoch": 0, "mini'
        (tmp_path / "metrics" / f"rank-{rank}.jsonl").write_text(text)
    assert transfers_s(tmp_path, plan) == (pytest.approx(0.01),)
    assert transfers_s(tmp_path / "nowhere", plan) == (None,)
    assert transfers_s(tmp_path, plan_of(profile, [1], [2, 1])) == (None, None)
    run = replace(observed(plan, (0.6 + 0.035) / 2, busy((0.2, 0.4, 0.0), sync_s=0.035)), transfers_s=(0.01,))
    found = calibrate([run], profile, cluster(2))
    assert found.cluster.levels[0].allreduce_efficiency == pytest.approx(ring_s(2, 2000, 1e6) / 0.01)
    assert sum(layer.forward_s + layer.backward_s for layer in found.profile.layers) == pytest.approx(0.6 + 0.025)
    assert found.step_times_s[0] == pytest.approx(run.step_time_s)

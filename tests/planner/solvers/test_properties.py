"""What must hold between the answers to related problems, whatever the formulas: on random problems of every kind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from instances import ALL_SCHEDULES, drawn, mixed_instance, unequal_instance

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import plain_data_parallel
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, GPIPE
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import dynamic_program

SLACK = 1 + 1e-8
"""Two searches for the same number."""
MOST = 60
"""The most problems for a property that is of no account for the first."""

Change = Callable[[Problem], Problem]


def _problems(start: int, count: int, **options: Any) -> Iterator[Problem]:
    """Problems of every kind, with some options set."""
    for seed in range(start, start + count):
        kind = unequal_instance if seed % 4 == 3 else mixed_instance
        schedule = ALL_SCHEDULES[seed % 5] if seed % 6 else None
        _, problem = drawn(seed, lambda number: kind(number, layers=5, schedule=schedule))  # noqa: B023
        yield _with(problem, **options)


@pytest.fixture(params=[2, pytest.param(6, marks=pytest.mark.slow)], ids=["few", "more"])
def count(request: pytest.FixtureRequest) -> int:
    """How many problems a property is held to, where that is of account for one of them; most take twice as many."""
    return int(request.param)


def _plan(problem: Problem) -> Plan | None:
    return dynamic_program.solve(problem, enumerate_cuts(problem, 10_000)).plan


def _step_time(problem: Problem) -> float:
    return dynamic_program.solve(problem, enumerate_cuts(problem, 10_000)).objective_s


def _with(problem: Problem, **options: Any) -> Problem:
    return replace(problem, options=replace(problem.options, **options))


def _free(problem: Problem) -> Problem:
    """The problem without the user's constraints."""
    nothing: dict[str, Any] = dict.fromkeys(("stages", "max_stages", "max_replicas", "max_workers"))
    return _with(problem, **nothing, pins=(), together=(), no_cut_after=())


def _same(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=1e-8)


def _links(cluster: Cluster, rate: float, latency: float) -> Cluster:
    """A cluster with all bandwidths and latencies multiplied."""
    levels = tuple(
        replace(level, bandwidth=rate * level.bandwidth, latency_s=latency * level.latency_s)
        for level in cluster.levels
    )
    machines = tuple(
        replace(
            server,
            card=rate * server.card,
            inside=replace(
                server.inside, bandwidth=rate * server.inside.bandwidth, latency_s=latency * server.inside.latency_s
            ),
        )
        for server in cluster.machines
    )
    return replace(cluster, levels=levels, machines=machines)


def _faster_links(problem: Problem) -> Problem:
    return problem.within(_links(problem.cluster, 2.0, 0.5))


def _faster_outermost_link(problem: Problem) -> Problem:
    *inner, top = problem.cluster.levels
    return problem.within(replace(problem.cluster, levels=(*inner, replace(top, bandwidth=3 * top.bandwidth))))


def _more_memory(problem: Problem) -> Problem:
    def more(device: Any) -> Any:
        return replace(device, memory_bytes=int(1.5 * device.memory_bytes))

    machines = tuple(replace(server, device=more(server.device)) for server in problem.cluster.machines)
    return problem.within(replace(problem.cluster, device=more(problem.cluster.device), machines=machines))


def _one_more_server(problem: Problem) -> Problem:
    cluster = problem.cluster
    top = replace(cluster.levels[-1], count=cluster.levels[-1].count + 1)
    if len(cluster.machines) > 2 and len(cluster.levels) > 2:
        return problem
    return problem.within(
        replace(cluster, levels=(*cluster.levels[:-1], top), machines=cluster.machines + cluster.machines[-1:])
    )


def _parallel_boundaries(problem: Problem) -> Problem:
    return _with(problem, boundary="parallel")


def _recomputing(problem: Problem) -> Problem:
    return _with(problem, recompute=True)


def _full_overlap(problem: Problem) -> Problem:
    return _with(problem, overlap=1.0)


def _inference(problem: Problem) -> Problem:
    return _with(problem, inference=True)


def _unlimited(problem: Problem) -> Problem:
    return _with(problem, memory=False)


@pytest.mark.parametrize(
    "better",
    [
        _faster_links,
        _faster_outermost_link,
        _more_memory,
        _one_more_server,
        _parallel_boundaries,
        _recomputing,
        _full_overlap,
        _inference,
        _unlimited,
        _free,
    ],
)
def test_more_of_anything_is_never_worse(better: Change, count: int) -> None:
    # Copies of a pipeline fill the whole cluster, so that one more server may take that space away.
    fixed = {_one_more_server: {"allow_copies": False}, _parallel_boundaries: {"boundary": "single"}}.get(better, {})
    fixed |= {"recompute": False} if better is _recomputing else {}
    gained, start = 0, 56 if better is _recomputing else 840
    for number, problem in enumerate(_problems(start, MOST, **fixed)):
        if number >= count and gained:
            break
        before, after = _step_time(problem), _step_time(better(problem))
        assert after <= before * SLACK, problem
        gained += after < before / SLACK
    assert gained, "nothing depended on it: the problems show nothing"


def _some_layers(problem: Problem) -> tuple[str, ...]:
    names = [layer.name for layer in problem.profile.layers]
    return tuple(random.Random(str(names)).sample(names, min(2, len(names))))


@pytest.mark.parametrize(
    "forbid",
    [
        lambda problem: _with(problem, max_stages=2),
        lambda problem: _with(problem, max_replicas=1),
        lambda problem: _with(problem, max_workers=2),
        lambda problem: _with(problem, stages=min(2, len(problem.units), problem.cluster.workers)),
        lambda problem: _with(problem, together=(_some_layers(problem),)),
        lambda problem: _with(problem, no_cut_after=_some_layers(problem)[:1]),
        lambda problem: _with(problem, pins=((_some_layers(problem)[0], 1),)),
        lambda problem: _with(problem, allow_copies=False),
    ],
    ids=["stages", "replicas", "workers", "exactly", "together", "cut", "pin", "copies"],
)
def test_forbidding_something_is_never_better(forbid: Change, count: int) -> None:
    lost = 0
    for number, problem in enumerate(_problems(840, MOST)):
        if number >= count and lost:
            break
        free = _free(problem)
        before, after = _step_time(free), _step_time(forbid(free))
        assert after >= before / SLACK, problem
        lost += after > before * SLACK
    assert lost, "nothing depended on it: the problems show nothing"


def test_a_limit_that_the_best_plan_keeps_changes_nothing(count: int) -> None:
    for problem in _problems(480, count):
        plan, best = _plan(_free(problem)), _step_time(_free(problem))
        if plan is None:
            continue
        stage_of = {name: number for number, stage in enumerate(plan.stages, start=1) for name in stage.layers}
        for limit in (
            {"stages": len(plan.stages)},
            {"max_stages": len(plan.stages)},
            {"max_replicas": max(stage.replicas for stage in plan.stages) // plan.copies},
            {"max_workers": plan.busy},
            {"pins": tuple(stage_of.items())},
            {"together": tuple(stage.layers for stage in plan.stages if len(stage.layers) > 1)},
            {"no_cut_after": plan.stages[-1].layers[:1]},
            {"recompute": any(stage.recompute for stage in plan.stages)},
        ):
            assert _same(_step_time(_with(_free(problem), **limit)), best), (limit, problem)


def test_memory_without_end_is_memory_that_does_not_bind(count: int) -> None:
    for problem in _problems(500, 2 * count, memory=False):
        plenty = replace(problem.cluster.device, memory_bytes=10**15)
        machines = tuple(
            replace(server, device=replace(server.device, memory_bytes=10**15)) for server in problem.cluster.machines
        )
        rich = problem.within(replace(problem.cluster, device=plenty, machines=machines))
        assert _same(_step_time(_with(rich, memory=True)), _step_time(problem)), problem


def test_scaling_all_times_scales_the_answer(count: int) -> None:
    for seed, problem in enumerate(_problems(520, 2 * count)):
        factor = (3.0, 0.25, 1 / 128)[seed % 3]
        layers = tuple(
            replace(layer, **{time: factor * getattr(layer, time) for time in ("forward_s", "backward_s", "update_s")})
            for layer in problem.profile.layers
        )
        profile = replace(problem.profile, layers=layers)
        scaled = replace(problem, profile=profile, cluster=_links(problem.cluster, 1 / factor, factor))
        assert _same(_step_time(scaled), factor * _step_time(problem)), problem


@pytest.mark.slow
def test_the_order_and_the_names_of_layers_do_not_matter(count: int) -> None:
    for seed, problem in enumerate(_problems(540, 2 * count)):
        profile, new = _relabelled(problem.profile, seed)
        options = replace(
            problem.options,
            pins=tuple((new[name], stage) for name, stage in problem.options.pins),
            together=tuple(tuple(new[name] for name in group) for group in problem.options.together),
            no_cut_after=tuple(new[name] for name in problem.options.no_cut_after),
        )
        assert _same(_step_time(Problem(profile, problem.cluster, options)), _step_time(problem)), problem


def _relabelled(profile: Profile, seed: int) -> tuple[Profile, dict[str, str]]:
    rng = random.Random(seed)
    names = [f"n{number}" for number in rng.sample(range(100), len(profile.layers))]
    new = dict(zip((layer.name for layer in profile.layers), names, strict=True))
    layers = [replace(layer, name=new[layer.name]) for layer in profile.layers]
    tensors = [
        replace(t, producer=new[t.producer], consumers=tuple(new[c] for c in t.consumers)) for t in profile.tensors
    ]
    rng.shuffle(layers)
    rng.shuffle(tensors)
    together = tuple(tuple(new[name] for name in group) for group in profile.together)
    return replace(profile, layers=tuple(layers), tensors=tuple(tensors), together=together), new


def test_splitting_a_level_in_two_of_the_same_rate_changes_nothing(count: int) -> None:
    split = 0
    for problem in _problems(560, 4 * count, allow_copies=False):
        cluster = problem.cluster
        for index, level in enumerate(cluster.levels):
            if cluster.machines or level.count not in (4, 6):
                continue
            halves = (replace(level, count=2), replace(level, count=level.count // 2))
            levels = (*cluster.levels[:index], *halves, *cluster.levels[index + 1 :])
            assert _same(_step_time(problem.within(replace(cluster, levels=levels))), _step_time(problem)), problem
            split += 1
    assert split


def test_a_level_of_one_changes_nothing(count: int) -> None:
    for problem in _problems(580, 2 * count):
        cluster = problem.cluster
        top = replace(cluster.levels[-1], count=1, bandwidth=1.0, latency_s=9.0)
        assert _same(
            _step_time(problem.within(replace(cluster, levels=(*cluster.levels, top)))), _step_time(problem)
        ), problem


def test_data_parallelism_is_a_plan_where_it_fits(count: int) -> None:
    counted = 0
    for problem in _problems(600, 2 * count):
        free = _free(problem)
        score = evaluate(plain_data_parallel(free, free.cluster.workers), free)
        if score.fits:
            assert _step_time(free) <= score.alone_s * SLACK, problem
            counted += 1
    assert counted


def test_one_forward_one_backward_is_never_worse_than_gpipe(count: int) -> None:
    for problem in _problems(620, 2 * count, inference=False):
        one = _with(problem, schedule="1f1b-flush", accumulate=6)
        assert _step_time(one) <= _step_time(_with(problem, schedule=GPIPE, accumulate=6)) * SLACK, problem


def test_updates_half_as_often_are_never_worse(count: int) -> None:
    for seed, problem in enumerate(_problems(640, 2 * count, inference=False, memory=False)):
        some = {"schedule": ACCUMULATING[seed % 3]}
        rare, often = (_step_time(_with(problem, **some, accumulate=size)) for size in (8, 4))
        assert rare <= often * SLACK, problem


def test_the_same_problem_gives_the_same_plan(count: int) -> None:
    for problem in _problems(660, 2 * count):
        assert len({str(_plan(problem)) for _ in range(2)}) == 1

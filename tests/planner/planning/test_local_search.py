"""The local search: it never makes a plan slower, keeps the constraints, and finds what moving one thing finds."""

from __future__ import annotations

import pipeplan
from pipeplan.cost.evaluate import evaluate
from pipeplan.from_options.option_fields import options_for
from pipeplan.planning.baselines import satisfies_options
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.figure import FiguredPlan, figured
from pipeplan.planning.local_search import LEAST_GAIN, improve, neighbours
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import NO_DEADLINE


def _problem(name: str, cluster: str, **options: object) -> Problem:
    return Problem(pipeplan.read_profile(name), pipeplan.cluster(cluster), options_for("cuda", **options))


def _start(problem: Problem) -> FiguredPlan:
    best, _ = best_in_time(problem, 10_000, NO_DEADLINE)
    assert best is not None
    return figured(best.plan, evaluate(best.plan, problem), problem, NO_DEADLINE)


CASES = (
    _problem("vgg16-v100", "A", schedule="1f1b-flush", accumulate=16),
    _problem("awd-lm-v100", "C", schedule="1f1b-flush", accumulate=8),
    _problem("s2vt-v100", "C", schedule="1f1b-stashing"),
)


def test_the_result_is_at_least_as_fast_and_no_neighbour_is_faster() -> None:
    for problem in CASES:
        start = _start(problem)
        found = improve(start, problem, NO_DEADLINE)
        assert found.step_s <= start.step_s
        assert found.score.fits
        for plan in neighbours(found, problem):
            try:
                score = evaluate(plan, problem)
            except pipeplan.InputError:
                continue
            if score.fits and score.step_time_s < found.step_s:
                near = figured(plan, score, problem, NO_DEADLINE)
                assert near.step_s >= found.step_s * (1 - LEAST_GAIN) or near.figure.simulated_s is None


def test_constraints_hold_for_every_plan_that_is_taken() -> None:
    problem = _problem("vgg16-v100", "A", schedule="1f1b-flush", accumulate=16, max_replicas=4, max_workers=9)
    found = improve(_start(problem), problem, NO_DEADLINE)
    assert satisfies_options(found.plan, problem)
    assert found.plan.busy <= 9


def test_a_grid_and_copies_keep_their_placement() -> None:
    problem = _problem("vgg16-v100", "B", schedule="1f1b-flush", accumulate=16, grid=True)
    found = improve(_start(problem), problem, NO_DEADLINE)
    assert len({stage.replicas for stage in found.plan.stages}) == 1


def test_the_same_search_gives_the_same_plan() -> None:
    problem = CASES[1]
    assert improve(_start(problem), problem, NO_DEADLINE).plan == improve(_start(problem), problem, NO_DEADLINE).plan

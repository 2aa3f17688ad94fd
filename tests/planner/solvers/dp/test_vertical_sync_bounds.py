"""The search under vertical sync against one that assumes every input stage and leaves none out."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from extents import first_few
from instances import drawn, mixed_instance

from pipeplan.plan import schedules
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.solvers.dp.budget import SearchLimits, Step
from pipeplan.solvers.dp.heterogeneous_search import HeterogeneousSearch, HeterogeneousTerms
from pipeplan.solvers.dp.stage_costs import CostTerms, InputStage
from pipeplan.solvers.dp.uniform_search import UniformSearch
from pipeplan.solvers.dp.vertical_sync import VerticalSearch, find_vertical_sync_pipeline


def _every_input_stage(terms: CostTerms, threshold: float, limits: SearchLimits) -> bool:
    """Whether there is a pipeline, by a search for every input stage, each from the least sum of depth and lag."""
    for replicas in range(1, terms.most_replicas + 1):
        delay = 1
        while steps := _once(replace(terms, first=InputStage(replicas, delay)), threshold, limits):
            needed = steps[0].depth + int(schedules.update_lag(replicas * terms.problem.copies, len(steps) == 1))
            if needed <= delay:
                return True
            delay = needed
    return False


def _once(terms: CostTerms, threshold: float, limits: SearchLimits) -> list[Step] | None:
    if isinstance(terms, HeterogeneousTerms):
        return HeterogeneousSearch(terms, threshold, limits).run()
    return (VerticalSearch if terms.first else UniformSearch)(terms, threshold, limits).run()


@pytest.mark.parametrize("seeds", first_few(range(1500), 5))
@pytest.mark.parametrize("kind", [CostTerms, HeterogeneousTerms])
def test_bounds_on_input_stages_change_no_answer(kind: type[CostTerms], seeds: range) -> None:
    answers = []
    for seed in seeds:
        rng = random.Random(seed)
        _, problem = drawn(seed, lambda one: mixed_instance(one, layers=6, schedule="vertical-sync"))
        terms = kind(problem, enumerate_cuts(problem, 1000))
        limits = SearchLimits(memory=True, recompute=rng.random() < 0.5)
        for _ in range(3):
            threshold = terms.floor * rng.uniform(1.0, 6.0)
            once = partial(_once, threshold=threshold, limits=limits)
            answers.append(find_vertical_sync_pipeline(terms, limits, once) is not None)
            assert answers[-1] == _every_input_stage(terms, threshold, limits), (seed, threshold)
    assert set(answers) == {True, False}

"""Finds a pipeline within a limit: selects the search and the cost terms for a cluster and a schedule.

Under vertical sync with a memory limit, every stage's memory depends on the input stage. The number of weight versions
(`schedules.vertical_versions`) grows with the input stage's replicas r, depth and lag. The search reaches that stage
last, so it assumes r and the sum of depth and lag. For every r, it looks for the smallest sum for which it finds a
pipeline whose input stage needs no larger sum. The sum grows from search to search. The pipeline of a search with too
small a sum gives a lower bound on the sum, because more versions leave less memory for everything else.

Two kinds of search come first, because they usually decide. If one of them finds no pipeline, there is none. If it
finds a pipeline that fits with all its versions, this pipeline is the result.

- With stashing: a stage keeps at least d + lag versions. Depths cover the minibatches in flight behind, so the input
  stage has d_1 r_1 ≥ r_1 + d r, and 1 + ceil(((d_1 + lag_1) r_1 - gcd(r_1, r)) / r) ≥ 1 + d.
- With the versions that every input stage needs (`cost_terms.AnyInputStage`). This search is repeated with
  the versions that the pipelines found need at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pipeplan.errors import InputError
from pipeplan.plan import schedules
from pipeplan.plan.schedules import VERTICAL
from pipeplan.problem.cuts import Cuts, Floats
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import SearchLimits, Step
from pipeplan.solvers.dp.search import placed_steps
from pipeplan.solvers.dp.search.batch_limit import BatchLimit
from pipeplan.solvers.dp.search.cost_terms import AnyInputStage, CostTerms, InputStage
from pipeplan.solvers.dp.search.flush_search import FlushSearch, PlacementFlushSearch
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.placement_search import PlacementSearch, SharedLimit
from pipeplan.solvers.dp.search.stage_sizing import CandidateStages, EndPositions
from pipeplan.solvers.dp.search.stage_terms import StageTerms
from pipeplan.solvers.dp.search.states import SearchStates
from pipeplan.solvers.dp.search.uniform_search import UniformSearch


class VerticalSearch(UniformSearch):
    """The search for one threshold and one assumed input stage, or for the smallest delay with any input stage."""

    def _undominated(self, cut: int, states: SearchStates) -> SearchStates:
        if cut > 0 or not isinstance(self.terms.first, AnyInputStage):
            return super()._undominated(cut, states)
        # States before the same stages differ only in their input stages. One of these needs the fewest versions.
        needed = AnyInputStage.delays(self.terms.problem.copies, states.depth, states.replicas)
        return states.take(np.flatnonzero(needed == needed.min()))

    def _replicas_by_level(
        self, stage: StageTerms, states: SearchStates, places: EndPositions
    ) -> tuple[CandidateStages, Floats]:
        candidates, replicas = super()._replicas_by_level(stage, states, places)
        return self._as_first(stage, candidates, replicas)

    def _as_first(
        self, stage: StageTerms, candidates: CandidateStages, replicas: Floats
    ) -> tuple[CandidateStages, Floats]:
        """Give an input stage the assumed number of replicas."""
        assert self.terms.first is not None
        if isinstance(self.terms.first, AnyInputStage):
            return candidates, replicas
        assumed = self.terms.first.replicas
        inputs = stage.begin[candidates.target] == 0
        kept = ~inputs | (replicas <= assumed)
        return candidates.take(kept), np.where(inputs, assumed, replicas)[kept]

    def _in_memory(
        self, stage: StageTerms, candidates: CandidateStages, replicas: Floats
    ) -> tuple[CandidateStages, Floats, Floats, Floats]:
        candidates, replicas, depth, demand = super()._in_memory(stage, candidates, replicas)
        assert self.terms.first is not None
        if isinstance(self.terms.first, AnyInputStage):
            return candidates, replicas, depth, demand
        kept = (stage.begin[candidates.target] > 0) | (replicas == self.terms.first.replicas)
        return candidates.take(kept), replicas[kept], depth[kept], demand[kept]


def find_vertical_sync_pipeline(
    terms: CostTerms, step_time_s: float, limits: SearchLimits, once: Callable[[CostTerms], list[Step] | None]
) -> list[Step] | None:
    """A pipeline within a step time with all weight versions in memory, or None.

    `once` runs one search for a pipeline within the step time, with an assumed input stage or with stashing.
    """
    steps = once(terms.stashing)
    if steps is None or placed_steps.steady_fits(terms, steps, step_time_s):
        return steps
    least = AnyInputStage(1, 1)
    if _has_no_single_stage(terms):
        steps, least = _with_any_input_stage(terms, step_time_s, once)
        if steps is None or placed_steps.steady_fits(terms, steps, step_time_s):
            return steps
    counts = range(1, terms.most_replicas + 1) if limits.shape is None else (limits.shape.replicas,)
    # The last pipeline nearly fits, so its input stage is the most promising one.
    promising = [count for count in counts if count == steps[0].replicas]
    for replicas in (*promising, *(count for count in counts if count not in promising)):
        found = _with_input_stage(terms, step_time_s, replicas, least, once)
        if found is not None:
            return found
    return None


def _has_no_single_stage(terms: CostTerms) -> bool:
    """Whether no stage can have all layers. Such a stage would keep one version, whatever its number of replicas."""
    if not terms.problem.cluster.uniform:
        return False
    last, start = len(terms.cuts.ideals) - 1, np.array([0])
    whole = [StageTerms.of(terms, last, start, recompute=again) for again in (False, True)]
    return all(one.deepest(replicated=several)[0] < 1 for one in whole for several in (False, True))


def _with_any_input_stage(
    terms: CostTerms, step_time_s: float, once: Callable[[CostTerms], list[Step] | None]
) -> tuple[list[Step] | None, AnyInputStage]:
    """A pipeline that fits with the versions that every input stage needs, and these versions.

    If the first is None, there is no pipeline. The search finds the smallest delay, so each pipeline found shows how
    many versions every pipeline needs at least.
    """
    assumed = AnyInputStage.within(terms, step_time_s)
    while True:
        steps = once(replace(terms, first=assumed))
        if steps is None or isinstance(terms, HeterogeneousTerms):
            return steps, assumed
        needed = AnyInputStage.of(terms.problem.copies, steps[0].depth, steps[0].replicas)
        if needed.delay <= assumed.delay:
            return steps, assumed
        assumed = needed


def _with_input_stage(
    terms: CostTerms,
    step_time_s: float,
    replicas: int,
    least: AnyInputStage,
    once: Callable[[CostTerms], list[Step] | None],
) -> list[Step] | None:
    """A pipeline whose input stage has `replicas` replicas, or None.

    Every input stage needs at least the versions of `least`.
    """
    delay = max(
        AnyInputStage.least_delay(terms, step_time_s, replicas), least.delay_with(replicas, terms.problem.copies)
    )
    while True:
        steps = once(replace(terms, first=InputStage(replicas, delay)))
        if steps is None:
            return None
        lag = int(schedules.update_lag(replicas * terms.problem.copies, len(steps) == 1))
        needed = steps[0].depth + lag
        if needed <= delay:
            return steps
        delay = needed


MOST_WORKERS = 1024
"""Largest number of workers for a search over all candidate placements. The number of placements is about half its
square."""


def terms_of(problem: Problem, cuts: Cuts) -> CostTerms:
    """The terms of the cost model for the problem's cluster.

    Raises `InputError` if the cluster is too large for the search that it needs.
    """
    if problem.cluster.uniform and problem.options.boundary == "single":
        return CostTerms(problem, cuts)
    if problem.cluster.workers > MOST_WORKERS:
        what = "boundaries over parallel links" if problem.cluster.uniform else "servers that differ"
        raise InputError(
            f"cluster {problem.cluster.name} has {problem.cluster.workers} workers; with {what} plans can be searched "
            f"for on at most {MOST_WORKERS}"
        )
    return HeterogeneousTerms(problem, cuts)


def limits_range(terms: CostTerms) -> tuple[float, float]:
    """(lower bound on the smallest limit for which there is a pipeline, limit that excludes no pipeline).

    Limits are seconds per minibatch, or, with a flush, seconds from one update to the next.
    """
    if terms.problem.options.flushes:
        batch = BatchLimit(terms, math.inf)
        return batch.floor_s, batch.most_s
    return terms.floor, terms.most


def find_pipeline(
    terms: CostTerms, limit: float, limits: SearchLimits, shared: SharedLimit | None = None
) -> list[Step] | None:
    """A pipeline within the limit, input to output, or None. Raises `OutOfTime`.

    In the steady state the result is any pipeline that has every resource within the limit, in seconds per minibatch.
    With a flush the result is the pipeline with the fastest batch, if that is within the limit, in seconds from one
    update to the next. With `shared`, which needs terms of all placements, shared resources stay within their limit as
    well.
    """
    if terms.problem.options.flushes:
        if isinstance(terms, HeterogeneousTerms):
            return PlacementFlushSearch(terms, limit, limits, shared).run()
        return FlushSearch(terms, limit, limits).run()

    def once(assumed: CostTerms) -> list[Step] | None:
        if isinstance(assumed, HeterogeneousTerms):
            return PlacementSearch(assumed, limit, limits, shared).run()
        return (VerticalSearch if assumed.first else UniformSearch)(assumed, limit, limits).run()

    if terms.training and terms.schedule == VERTICAL and limits.memory:
        return find_vertical_sync_pipeline(terms, limit, limits, once)
    return once(terms)


def pipeline_step_time(terms: CostTerms, steps: list[Step], *, depths: bool) -> float:
    """Seconds per minibatch of one copy, by the slowest stage or boundary, and with `depths` also by the depths.

    With a flush the result is the time from one update to the next, which does not depend on depths.
    """
    if terms.problem.options.flushes:
        return placed_steps.batch_s(terms, steps)
    return placed_steps.steady_step_time(terms, steps, depths=depths)


def pipeline_fits(terms: CostTerms, steps: list[Step], step_time_s: float) -> bool:
    """Whether every worker's memory suffices at the depths that a step time needs, or, with a flush, at the pipeline's
    own depths.
    """
    if terms.problem.options.flushes:
        return placed_steps.batch_fits(terms, steps)
    return placed_steps.steady_fits(terms, steps, step_time_s)

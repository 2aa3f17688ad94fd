"""The integer linear program for the fastest plan, over columns, solved through PuLP.

The program shares the cost formulas and the spaces of plans with the dynamic program, but not its cuts and searches.

A column i is one choice for a stage: the cuts at which its layers begin and end, its place (r consecutive workers from
s), whether it recomputes, and its depth d, the minibatches in flight. The coefficients of a column come from the
evaluator's formulas (`columns`). A column is left out if it takes longer than the limit U on the step time, does not
fit in memory, or is on no path from the input to the output (`enumeration`). If no columns remain, there is no plan
within U, and no program. A boundary is a pair of places that meet at a cut, with the idle workers between them.

    y[i] ∈ {0,1}     the column is chosen
    x[c,j] ∈ [0,1]   the boundary j is in use at cut c
    a[c,j] ≥ 0       minibatches behind the boundary that the stage before it covers
    V[p], W[p] ≥ 0   with a flush: the longest path from worker p on, without and with the boundary that ends there
    T ≥ 0            seconds per minibatch in one copy of the pipeline, or, with a flush, from one update to the next
    C ≥ 0            seconds per minibatch of all copies together; to be minimised

Let t be the time of a column or the time for which a boundary is busy, and L a lower bound on T.

The constraints are:

(1) One chosen column begins with no layers.
(2) At every cut and place, as many columns end as boundaries begin, and as many boundaries end as columns begin.
(3) C is at least T combined with the synchronisation of the copies according to the overlap, and at least the wait of
    plain data parallelism for its update.
(4) T - L is at least the sum of t - L over the columns with t > L that use a worker, and over the boundaries
    behind it. With a flush, T and V follow the paths of docs/cost-model.md, "Flush schedules".
(5) The minibatches that the columns before a cut cover at the limit, less the messages on their way, are at least the
    sum of a. That sum is at least the demand of the columns behind the cut: `formulas.in_flight_depth`.
(6) C is at least the work of a server's workers over the cores that they share.
(7) The user's numbers of stages and workers hold. If a layer is pinned to stage n, its stage is the n-th to start.
(8) C is at least the load of every card: rings of columns, and messages of boundaries.
(9) Under vertical sync, a stage whose memory has no room for n versions excludes input stages that require n.

A program has depths and (5) only if the plan of the program without them does not fit. These are the depths for U, so
the optimum is a lower bound. If a plan does not attain the bound, U becomes the plan's step time, until no plan is
within U.
"""

from __future__ import annotations

import time
from dataclasses import replace

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention, formulas
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_table import exchange_times
from pipeplan.cost.stage_times import plain_data_parallel
from pipeplan.plan.plan import Plan
from pipeplan.problem.grid_shapes import GridShape, data_parallel_grid_size, grid_shapes
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.columns import minibatches_per_update
from pipeplan.solvers.ilp.cut_table import MOST_CUTS, CutTable
from pipeplan.solvers.ilp.space_search import CUTOFF_SLACK, PRECISION, IlpLimits, SpaceAnswer, SpaceSearch
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline, OutOfTime

__all__ = ["IlpLimits", "solve"]

MOST_WORKERS = 128
"""Largest number of workers of one copy of the pipeline."""


def solve(problem: Problem, limits: IlpLimits, cutoff_s: float | None = None) -> Result:
    """The best plan over all spaces of plans.

    `cutoff_s` excludes slower plans from the search (with a margin of `CUTOFF_SLACK`). The verdict stays independent of
    the solver that found the cut-off, because the program must still find its own plan and prove that no plan is
    better.
    """
    search = _IlpSearch(problem, limits, cutoff_s)
    try:
        search.run()
    except KeyboardInterrupt:
        search.stop()
    except OutOfTime:
        search.leave_out()
    return search.result()


class _IlpSearch:
    """The best plan and the bound so far, over the spaces of plans that have been searched."""

    def __init__(self, problem: Problem, limits: IlpLimits, cutoff_s: float | None) -> None:
        self.problem = problem
        self.limits = limits
        self.cutoff_s = cutoff_s
        self.began = time.perf_counter()
        self.deadline = Deadline.after(limits.seconds)
        self.best: tuple[float, Plan] | None = None
        """The fastest plan found so far, with its step time by the evaluator."""
        self.proven = True
        self.interrupted = False
        self.refusal = ""
        """The reason why some space was not searched; empty if all were."""
        self.bound = float("inf")
        self.known = None if cutoff_s is not None else _data_parallel(problem)
        """(step time, plan) of plain data parallelism if that plan is allowed, else None."""
        known_s = self.known[0] if self.known else float("inf")
        self.upper = (cutoff_s if cutoff_s is not None else known_s) * (1 + CUTOFF_SLACK)
        # Lower bound: all work on all workers or cores. A search that is stopped proves no more than this.
        self.floor_s = max(
            problem.work_s / problem.cluster.total_speed, contention.least_step_time_of_shared_cores_s(problem)
        )
        self.size = (0, 0)
        self.left: list[SpaceSearch] = []
        """The searches of the spaces that remain."""

    def run(self) -> None:
        """Search all spaces.

        If another solver's step time is known, all lower bounds are raised before the first program, because that
        program may take all of the time.
        """
        self.deadline.check()
        cuts = CutTable.of(self.problem)
        if cuts is None or self.problem.cluster.workers > MOST_WORKERS:
            what = f"{MOST_CUTS:,} cuts" if cuts is None else f"{MOST_WORKERS} workers"
            self.refusal, self.proven = f"the integer program would be too large: more than {what}", False
            return
        self.left = [found for space in plan_spaces(self.problem) for found in self._prepared(space, cuts)]
        if self.cutoff_s is not None:
            for search in self.left:
                search.narrow()
        while self.left:
            self._search_next()

    def stop(self) -> None:
        """Give up the remaining spaces because of Ctrl-C."""
        self.interrupted = True
        self.leave_out()

    def leave_out(self) -> None:
        """Give up the remaining spaces."""
        self.proven = False
        self.bound = min([self.bound, self.floor_s, *(max(self.floor_s, search.low_s) for search in self.left)])
        self.left = []

    def _prepared(self, space: PlanSpace, cuts: CutTable) -> list[SpaceSearch]:
        """The searches of a space, one for each shape of a grid; none if it has no plan below the upper bound."""
        inner = space.inner(self.problem)
        low_s = max(space.floor(self.problem), 0.0 if inner.options.flushes else space.synchronisation(self.problem))
        if low_s > self.upper or minibatches_per_update(inner) == 0:
            return []
        shapes: list[GridShape | None] = [*grid_shapes(inner)] if inner.options.grid else [None]
        high_s, is_bounded = min(self.upper, self._slowest(space, inner)), self.cutoff_s is not None
        return [
            SpaceSearch(self.problem, space, cuts, shape, low_s, high_s, self.limits, self.deadline, is_bounded)
            for shape in shapes
        ]

    def _search_next(self) -> None:
        """Search the next space for a plan that is better than the best plan so far."""
        if self.interrupted:
            self.stop()
            return
        search = self.left[0]
        search.high_s = min(search.high_s, self.upper)
        if search.low_s > search.high_s or (self.best and self.best[0] <= self.floor_s * (1 + PRECISION)):
            self.left.pop(0)
            return  # The best plan keeps all workers busy, or no plan of this space is better.
        try:
            search.run()
        finally:
            self._take(search.answer)
        self.left.pop(0)

    def _take(self, answer: SpaceAnswer) -> None:
        """Add what the search of one space found."""
        self.refusal = answer.refusal or self.refusal
        self.proven &= answer.proven
        self.interrupted |= answer.interrupted
        self.size = max(self.size, answer.size)
        self.bound = min(self.bound, max(self.floor_s, answer.bound_s))
        if answer.best and (self.best is None or answer.best[0] < self.best[0] * (1 - PRECISION)):
            self.best = answer.best
        if self.best:
            self.upper = min(self.upper, self.best[0])

    def _slowest(self, space: PlanSpace, inner: Problem) -> float:
        """Upper bound on the step time of useful plans in a space."""
        slowest = _slowest_step_time(inner)
        if not inner.options.flushes or inner.options.accumulate is None:
            return space.step_time(self.problem, slowest) + _most_on_cores(inner)
        # The factor counts each boundary once for filling, and the slowest boundary for all minibatches.
        most = (inner.options.accumulate + inner.cluster.workers) * slowest
        most += 2 * inner.cluster.workers * sum(exchange_times(inner))
        return most / inner.options.accumulate + _most_on_cores(inner)

    def result(self) -> Result:
        """The result over all spaces that were searched."""
        name = "ILP (HiGHS)"
        limited = "the search was limited to plans within 1e-6 of the DP's objective" if self.cutoff_s else ""
        reason = self.refusal or ("it was stopped by Ctrl-C" if self.interrupted else "")
        bound = self.bound if self.bound < float("inf") else self.floor_s
        note, seconds = reason or "it found no plan within the time limit", time.perf_counter() - self.began
        nothing = Result(name, Status.TIME_LIMIT, None, float("inf"), bound, seconds, note, self.size, self.interrupted)
        nothing = replace(nothing, charged=True)
        if self.best is None and self.proven:
            return replace(nothing, status=Status.INFEASIBLE, bound_s=float("inf"), note=reason or limited)
        if self.best is None and (self.known is None or self.refusal):
            return nothing
        if self.best is None and not reason:
            reason = "it found no plan in time; plain data parallelism needs no search"
        step_time_s, plan = self.best or self.known or (float("inf"), None)
        found = replace(nothing, plan=plan, objective_s=step_time_s, bound_s=min(bound, step_time_s))
        if self.proven and self.limits.gap == 0:
            return replace(found, status=Status.OPTIMAL, bound_s=min(self.bound, step_time_s), note=reason or limited)
        return replace(found, status=Status.FEASIBLE, note=reason)


def _data_parallel(problem: Problem) -> tuple[float, Plan] | None:
    """(step time, plan) of plain data parallelism if that plan is allowed and fits in memory, else None."""
    options = problem.options
    workers = min(options.max_replicas or problem.cluster.workers, options.max_workers or problem.cluster.workers)
    workers = min(workers, problem.cluster.workers)
    if options.grid:
        workers = data_parallel_grid_size(problem, workers)
    if options.stages not in (None, 1) or any(number != 1 for _, number in options.pins):
        return None
    plan = plain_data_parallel(problem, workers)
    score = evaluate(plan, problem)
    return (score.step_time_s, plan) if score.fits else None


def _slowest_step_time(problem: Problem) -> float:
    """Upper bound on the step time of a good plan of one pipeline, in seconds per minibatch.

    The bound counts all work on the slowest worker, with forward passes twice, and all synchronisation and traffic as
    exposed.
    """
    links, workers = Links.of(problem.cluster), problem.cluster.workers
    rate = links.allreduce_bandwidth[-1], links.allreduce_latency[-1]
    size = problem.parameter_bytes
    allreduce = max(float(formulas.ring_allreduce_time(count, size, *rate)) for count in range(1, workers + 1))
    traffic = sum(flow.bytes + flow.gradient_bytes for flow in problem.flows)
    transfer = formulas.transfer_time(traffic, links.sendrecv_bandwidth[-1], links.sendrecv_latency[-1])
    # The longest wait of 2BW with the most minibatches in flight (`formulas.buffered_step_time`).
    buffered = problem.copies * (allreduce + problem.copies_allreduce_s)
    return float(2 * _most_on_cores(problem) + 2 * (allreduce + transfer) + buffered)


def _most_on_cores(problem: Problem) -> float:
    """Upper bound on the work of all workers on one minibatch, with all-reduces, in seconds on the slowest device."""
    costs, workers = problem.executor_costs, problem.cluster.workers
    traffic = sum(flow.bytes + flow.gradient_bytes for flow in problem.flows)
    copied = problem.parameter_bytes * problem.copied_share
    own_s = formulas.executor_time(costs, problem.passes, 2, 2 * traffic, copied, problem.options.update_share)
    links = Links.of(problem.cluster)
    rate = links.allreduce_bandwidth[-1], links.allreduce_latency[-1]
    reduce_s = 2 * (problem.parameter_bytes / rate[0] + workers * rate[1])
    slowest = min(device.speed for device in problem.cluster.devices)
    return float((2 * problem.work_s + workers * (own_s + costs.samples_s)) / slowest + workers * reduce_s)

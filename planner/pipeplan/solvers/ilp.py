"""The same problem as an integer linear program on the layers of the DAG, through PuLP.

It shares the cost formulas with the dynamic program and nothing else: no cuts, no ideals, no order of the layers.

Notation. Layers l, edges (u, v), tensors k with producer u and consumers V. Workers 0 … D-1 in a row. A run ρ is r
workers from s, and the idle ones behind them up to e (`ilp_runs` says which suffice). A place π = (s, r) is a run
whatever is idle behind it. Products of what the layers sum up to and of the choice of r are avoided by *shares*: one
number for each place, zero where no stage is there, that add up to the sum over the layers that start at s.

    y[ρ] ∈ {0,1}     ρ holds a stage
    Z[l,p] ∈ {0,1}   the stage of layer l starts at worker p or before; Z[l,D-1] = 1, Z[l,-1] = 0
    z[l,p]           = Z[l,p] - Z[l,p-1]: l is in the stage that starts at p
    c[π], w[π] ≥ 0   shares of work and of parameters
    b[k,p] ∈ [0,1]   tensor k crosses the cut p, of all that starts at p or before
    λ[p,n] ∈ [0,1]   the stages on both sides of cut p lie in one component of level n, and of no lower one
    e[p,n] ≥ 0       time of what crosses p at level n, for each direction
    T ≥ 0            seconds per minibatch, to be minimised; U is an upper bound on it

(1) The runs follow each other: as many runs start at a worker as end before it, and one is the first.
(2) Z never falls with p, and along an edge Z[v,p] ≤ Z[u,p].
(3) z[l,p] is at most the sum of y over those runs from p on which l is possible within U: alone, and with all work that
    must come before or behind it. A run that is used has a layer.
(4) c and w are shares; compute plus the exposed part of synchronisation, and the other way round, are at most T, and at
    most U·y.
(5) b[k,p] ≥ Z[u,p] - Z[v,p] for every consumer v. The cut p is the same all over a run: no stage starts inside.
(6) One λ[p,n] holds unless nothing is behind p. Below the outermost level it takes a run over p that begins and ends
    within the component around p, and one behind p that ends in it.
(7) e[p,n] ≤ U·λ[p,n]; bytes over p are the sum of e[p,n] times the rates; the sum of e[p,n] is at most T.

Depths are added only where what the program without them finds does not stand with them: because a worker's memory is
too small, or two versions of the weights too few (2BW). Its optimum is a bound on T then.

    δ[ρ,d] ∈ {0,1}   ρ holds a stage with d minibatches in flight; with recomputation one for each way
    t[ρ,d] ≥ 0       = T·δ[ρ,d]
    g[ρ] ≥ 0         its wait for a group (`cost.group_wait` · T)
    m[ρ,d] ≥ 0       shares of what the memory of a stage holds d times

(8) One δ for a used ρ. L·δ ≤ t ≤ U·δ, for the bound L on T; t sums up to T over the runs that hold a worker.
(9) g[ρ] is at least the all-reduce of its group less T (with copies of the pipeline: r - 1/m times T; 2BW: none).
(10) Where runs meet, (d-1)·r·t of the one before is at least d·r·t + g of the one behind, its own g, and twice the
    transfer: `cost.in_flight_depth` times T. 2BW: the all-reduces are at most (M + 1/m - d·r)·t (`cost.buffered_pace`).
(11) Weights, gradient, state, buffers, and d·m over all d fit the device; m[ρ,d] ≤ memory/d · δ[ρ,d].
A stage that recomputes has its forward work once more in (4); in (11) its saved bytes and output count once.

With `boundary` parallel, λ and e are chosen for the number of links too, which takes as many replicas on both sides.

Nearly without big numbers, so that the relaxation is tight once U is close to the optimum. Hence U is not taken from
afar: the program is solved for U a little above the bound that all work on all workers gives, and for larger U as long
as it is infeasible. The last of these programs is the proof: it holds all plans up to its U. Where another solver's
objective is given as a cut-off, that is U.

The constraints that the user may add: stages counted by y, busy workers by r·y; a layer pinned to stage i has Z[l,p] =
[i or more stages start by p]. Layers that must share a stage are joined beforehand (`ilp_layers`).

With a flush the objective is another: `ilp_flush` has it in (12) to (15), and T in (8) to (10) is the pace within a
batch; a stage that holds all minibatches of an update is released from (10).

A uniform grid (`Options.grid`) has only the runs that are part of one, and for each shape of S stages with r replicas

    q[S,r] ∈ {0,1}   the grid has this shape

(16) One q holds; y[ρ] is the sum of q over the shapes that ρ is part of.

Not expressed, and refused: memory under vertical sync, where it limits, and where too many depths are possible (some
40 workers and more).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeplan import cost
from pipeplan.evaluate import evaluate
from pipeplan.grid import shapes, workers_alone
from pipeplan.links import Links
from pipeplan.plan import VERTICAL, Plan, Stage, data_parallel
from pipeplan.problem import Problem
from pipeplan.solvers import backend, depths
from pipeplan.solvers.backend import Answer
from pipeplan.solvers.ilp_depth import Depths, TooManyChoicesError
from pipeplan.solvers.ilp_flush import Flush
from pipeplan.solvers.ilp_memory import Memory, limit_memory_at_depth_one
from pipeplan.solvers.ilp_model import Model, Place, minibatches
from pipeplan.solvers.ilp_program import Variable
from pipeplan.solvers.pipeline import Space, spaces
from pipeplan.solvers.result import Result, Status

# How far above a bound that another solver gave the program still looks for plans: a bound that is too low shows as
# "infeasible", one that is too high as a better plan.
CUTOFF_SLACK = 1e-6

# Upper bounds to try, relative to the lower bound, the first two not where depths matter; beyond the last, each is so
# many times the one before.
_RUNGS = (1.01, 1.04, 1.12, 1.3, 1.7, 2.5)
_BEYOND = 2.5


MOST_CHOICES = 200_000
"""Runs of workers times layers: about as many variables take a minute to write down."""


@dataclass(frozen=True)
class Limits:
    """When to stop."""

    seconds: float | None = None
    gap: float = 0.0
    solver: str = "highs"
    """`highs` or `cbc`."""


def solve(problem: Problem, limits: Limits, cutoff_s: float | None = None) -> Result:
    """The best plan over both plan spaces.

    `cutoff_s` excludes slower plans from the search (with `CUTOFF_SLACK`). The verdict stays independent of whoever
    gave it: the program must still find a plan of its own, and prove that there is no better one.
    """
    search = _IlpSearch(problem, limits, cutoff_s)
    try:
        for space in spaces(problem):
            search.look_in(space)
    except KeyboardInterrupt:
        search.stop()
    return search.result()


def _too_many_runs(inner: Problem) -> str:
    """Why the program cannot be written down in a time that anybody waits for, empty where it can."""
    workers = inner.cluster.workers
    most = min(inner.options.max_replicas or workers, workers)
    runs = workers * most - most * (most - 1) // 2
    if inner.options.grid:
        runs = sum(shape.stages for shape in shapes(inner))
    if runs * len(inner.units) <= MOST_CHOICES:
        return ""
    return f"{runs} runs of workers for each of {len(inner.units)} layers"


class IlpModel(Model):
    """The whole integer program of one pipeline on one cluster, whose pace is known to lie between two bounds.

    It adds to the placement of stages (`ilp_model`) an objective, the user's constraints and, where it is `complete`,
    the depths with the memory that follows from them. Otherwise the only limit on memory is that of depth 1, which
    every plan satisfies.
    """

    def __init__(self, problem: Problem, floor_s: float, upper_s: float, *, complete: bool) -> None:
        super().__init__(problem, floor_s, upper_s)
        self.flush: Flush | None = None
        if problem.options.flushes:
            self.flush = Flush(self, self.minibatches or 1)
            self.carried, self.cycle = self.flush.times, self.flush.cycle
        else:
            self.carried = self.charge_boundaries()
        self._charge({})
        self.add_user_constraints()
        self.depths: Depths | None = None
        if complete:
            self._add_depths()
        elif problem.options.memory:
            limit_memory_at_depth_one(self)

    def _charge(self, again: dict[Place, Variable]) -> None:
        """Charge the time of every place, including the forward work that it computes `again`."""
        if self.flush is None:
            self.charge_stages(again)
        else:
            self.flush.charge(again)

    def _add_depths(self) -> None:
        options = self.problem.options
        if self.problem.training:
            self.depths = Depths(self, recompute=options.recompute and options.memory)
            if again := self.depths.forward_again():
                self._charge(again)
        if options.memory:
            Memory(self, self.depths)

    def stages(self) -> list[Stage]:
        """The stages of the solution, input to output, on the workers of one copy, with depth 1 throughout."""
        again = self.depths.recomputing() if self.depths else set()
        return [Stage(self.names(run), tuple(run.workers), 1, 1, run in again) for run in self.chosen()]


class _IlpSearch:
    """What is known so far, over the spaces that have been searched."""

    def __init__(self, problem: Problem, limits: Limits, cutoff_s: float | None) -> None:
        self.problem = problem
        self.limits = limits
        self.cutoff_s = cutoff_s
        self.began = time.perf_counter()
        self.best: tuple[float, Plan] | None = None
        self.proven = True
        self.interrupted = False
        self.refusal = ""
        """What the program does not express, if that matters."""
        self.bound = float("inf")
        self.known = None if cutoff_s is not None else _data_parallel(problem)
        """Plain data parallelism where that is a plan that may be returned, and its pace."""
        known_s = self.known[0] if self.known else float("inf")
        self.upper = (cutoff_s if cutoff_s is not None else known_s) * (1 + CUTOFF_SLACK)
        # No plan is faster than all work on all workers; a stopped search proves no more than that.
        self.floor_s = problem.work_s / problem.cluster.total_speed
        self.size = (0, 0)

    def stop(self) -> None:
        """Leave out what has not been searched."""
        self.interrupted, self.proven = True, False
        self.bound = min(self.bound, self.floor_s)

    def look_in(self, space: Space) -> None:
        """Search one space for a plan that is better than the best so far."""
        if self.interrupted:
            self.stop()
            return
        if self.best and self.best[0] <= self.floor_s * (1 + 1e-9):
            return  # All workers are busy all the time: nothing is better.
        if space.synchronisation(self.problem) > self.upper:
            return
        inner = space.inner(self.problem)
        if minibatches(inner) == 0 or (inner.options.grid and not shapes(inner)):
            return
        low, high = self._bounds(space, inner)
        if self._refused(_too_many_runs(inner)):
            self.bound = min(self.bound, max(self.floor_s, space.pace(self.problem, 0.0)))
            return
        model, answer = self._climb(inner, low, high, complete=False)
        if answer.found and answer.proven and not self._sound(space, model):
            # What was left out matters. The answer is a bound all the same.
            low = max(low, answer.bound * model.unit_s)
            if answer.interrupted:
                self.stop()
                return
            if self._refused(_unexpressed_depths(inner)):
                self.bound = min(self.bound, space.pace(self.problem, low))
                return
            try:
                model, answer = self._climb(inner, low, high, complete=True)
            except TooManyChoicesError as error:
                self._refused(f"memory, with {error}")
                self.bound = min(self.bound, space.pace(self.problem, low))
                return
        self.proven &= answer.proven
        self.interrupted |= answer.interrupted
        if answer.bound < float("inf"):
            found = space.pace(self.problem, max(low, answer.bound * model.unit_s))
            self.bound = min(self.bound, max(self.floor_s, found))
        if answer.found:
            self._keep(space, model)

    def _bounds(self, space: Space, inner: Problem) -> tuple[float, float]:
        """Of the pace of one copy; with a flush of the time from one update to the next."""
        slowest = _slowest(inner)
        options, count = self.problem.options, minibatches(inner)
        if not options.flushes or count is None or options.accumulate is None:
            return self.floor_s * space.copies, min(self.upper * space.copies, slowest)
        fastest = max(device.speed for device in inner.cluster.devices)
        low = max(inner.work_s / fastest, count * inner.work_s / inner.cluster.total_speed)
        # Each boundary is charged for filling once, and as the slowest for all minibatches.
        return low, min(self.upper * options.accumulate, (count + inner.cluster.workers) * slowest)

    def _refused(self, reason: str) -> bool:
        """Whether the program does not express something, which is then said instead of a wrong answer."""
        if reason:
            self.refusal, self.proven = reason, False
        return bool(reason)

    def _sound(self, space: Space, model: IlpModel) -> bool:
        """Whether a plan that was found without depths keeps its pace, and fits in memory, with them."""
        pace, plan = self._plan(space, model)
        score = evaluate(plan, self.problem)
        return score.fits and score.alone_s <= pace * (1 + CUTOFF_SLACK)

    def _climb(self, inner: Problem, low: float, high: float, *, complete: bool) -> tuple[IlpModel, Answer]:
        """The program with an upper bound that is as low as possible, and its answer."""
        asked = False
        for threshold in self._thresholds(low, high, complete=complete):
            if complete and self.cutoff_s is None and threshold > low * _RUNGS[-1] and not asked:
                # More time never takes more memory: is there any plan at all?
                asked = True
                model, answer = self._ask(inner, high, high, complete=True, confirm=True)
                if not answer.found:
                    return model, answer if answer.proven else replace(answer, bound=0.0)
            model, answer = self._ask(inner, low, threshold, complete=complete, confirm=threshold >= high)
            if answer.found or not answer.proven:
                break
        return model, answer

    def _ask(
        self, inner: Problem, low: float, high: float, *, complete: bool, confirm: bool
    ) -> tuple[IlpModel, Answer]:
        model = IlpModel(inner, low, high, complete=complete)
        self.size = max(self.size, model.program.size)
        program, limits = model.program.lp, self.limits
        return model, backend.run(program, limits.solver, self._remaining(), limits.gap, confirm=confirm)

    def _thresholds(self, low: float, high: float, *, complete: bool) -> Iterator[float]:
        if self.cutoff_s is None:
            threshold = low
            for factor in _RUNGS[2:] if complete else _RUNGS:
                threshold = low * factor
                if threshold < high:
                    yield threshold
            while (threshold := threshold * _BEYOND) < high:
                yield threshold
        yield high

    def _remaining(self) -> float | None:
        if self.limits.seconds is None:
            return None
        return max(0.1, self.limits.seconds - (time.perf_counter() - self.began))

    def _plan(self, space: Space, model: IlpModel) -> tuple[float, Plan]:
        pace = space.pace(self.problem, model.objective())
        plan = space.plan(self.problem, model.stages())
        return pace, depths.assign(plan, self.problem, pace * (1 + CUTOFF_SLACK / 10))

    def _keep(self, space: Space, model: IlpModel) -> None:
        pace, plan = self._plan(space, model)
        if self.best is None or pace < self.best[0] * (1 - 1e-9):
            self.best = pace, plan
            self.upper = min(self.upper, pace)

    def result(self) -> Result:
        """What came of it."""
        seconds = time.perf_counter() - self.began
        name = f"ILP ({backend.NAMES[self.limits.solver]})"
        note = "searched below the DP's objective (plus 1e-6) only; plan and bound are its own" if self.cutoff_s else ""
        if self.interrupted:
            note = "stopped by Ctrl-C"
        if self.refusal:
            note = f"not expressed by the integer program: {self.refusal}"
        bound = self.bound if self.bound < float("inf") else self.floor_s
        nothing = Result(name, Status.TIME_LIMIT, None, float("inf"), bound, seconds, note, self.size, self.interrupted)
        if self.best is None and self.proven:
            return replace(nothing, status=Status.INFEASIBLE, bound_s=float("inf"))
        if self.best is None and (self.known is None or self.refusal):
            return nothing
        if self.best is None and not note:
            note = "nothing found in time; plain data parallelism is known without a search"
        pace, plan = self.best or self.known or (float("inf"), None)
        assert plan is not None
        found = Result(
            name, Status.OPTIMAL, plan, pace, min(self.bound, pace), seconds, note, self.size, self.interrupted
        )
        if self.proven and self.limits.gap == 0:
            return found
        # A search that was stopped need not have brought T down to what its plan is worth, nor its depths into memory.
        score = evaluate(plan, self.problem)
        if not score.fits:
            return replace(nothing, bound_s=min(self.bound, score.alone_s))
        return replace(found, status=Status.FEASIBLE, objective_s=score.alone_s, bound_s=min(self.bound, score.alone_s))


def _unexpressed_depths(problem: Problem) -> str:
    """What of a problem the program does not express where memory limits."""
    if problem.training and problem.options.schedule == VERTICAL:
        return "memory under vertical-sync"
    return ""


def _data_parallel(problem: Problem) -> tuple[float, Plan] | None:
    """Plain data parallelism and its pace, where that is a plan that may be returned."""
    options = problem.options
    workers = min(options.max_replicas or problem.cluster.workers, options.max_workers or problem.cluster.workers)
    workers = min(workers, problem.cluster.workers)
    if options.grid:
        workers = workers_alone(problem, workers)
    if options.several or options.stages not in (None, 1) or any(number != 1 for _, number in options.pins):
        return None
    plan = data_parallel(
        problem.layer_names,
        workers,
        inference=options.inference,
        schedule=options.schedule,
        accumulate=options.accumulate,
    )
    score = evaluate(plan, problem)
    return (score.alone_s, plan) if score.fits else None


def _slowest(problem: Problem) -> float:
    """More than any plan of one pipeline need take: all work, with forward passes twice, on the slowest worker, and all
    synchronisation and traffic exposed."""
    links, workers = Links.of(problem.cluster), problem.cluster.workers
    rate = links.allreduce_bandwidth[-1], links.allreduce_latency[-1]
    size = sum(unit.parameter_bytes for unit in problem.units)
    allreduce = max(float(cost.ring_allreduce_time(count, size, *rate)) for count in range(1, workers + 1))
    traffic = sum(flow.bytes + flow.gradient_bytes for flow in problem.flows)
    transfer = cost.transfer_time(traffic, links.sendrecv_bandwidth[-1], links.sendrecv_latency[-1])
    speed = min(device.speed for device in problem.cluster.devices)
    # Of 2BW with as many minibatches in flight as there may be: `cost.buffered_pace`.
    buffered = problem.copies * (allreduce + problem.copies_allreduce_s)
    return 2 * problem.work_s / speed + 2 * (allreduce + float(transfer)) + buffered

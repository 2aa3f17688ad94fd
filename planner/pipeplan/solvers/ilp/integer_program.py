"""The integer linear program for the fastest plan, on the layers of the DAG, solved through PuLP.

It shares the cost formulas with the dynamic program and nothing else.

Notation
--------
The indices are layers l, edges (u, v), tensors k with a producer u and consumers V, and workers p = 0 … D-1 in a row. A
candidate placement ρ is r workers from s, together with the idle workers behind them up to e (`placements` says which
placements suffice). A place π = (s, r) is a placement without regard to the idle workers. Let n(r) = ceil(M / r), where
M is the number of minibatches per update.

    y[ρ] ∈ {0,1}     a stage is on ρ
    o[s] ∈ {0,1}     the first stage starts at worker s
    Z[l,p] ∈ {0,1}   the stage of layer l starts at worker p or before; Z[l,D-1] = 1, Z[l,-1] = 0
    z[l,p]           = Z[l,p] - Z[l,p-1]: the stage of l starts at p
    c[π], w[π] ≥ 0   shares of work and of parameters
    b[k,p] ∈ [0,1]   tensor k crosses the cut p, behind all stages that start at p or before
    λ[p,n] ∈ [0,1]   the stages on both sides of cut p lie in one component of level n, and of no lower level; where
                     servers differ, one λ for each pair of bandwidth and latency that two placements may have there
    e[p,n] ≥ 0       time of the traffic over cut p at level n, for each direction
    T ≥ 0            seconds per minibatch of one copy; U is an upper bound on T
    C ≥ 0            what all copies take for as many minibatches as T is for, with everything charged; to be minimised

A *share* replaces the product of a sum over layers and the choice of r: one number for each place, which is zero where
there is no stage, such that the numbers of all places at p add up to the sum over the layers whose stage starts at p.

Constraints
-----------
 (1) The placements follow each other: as many start at a worker as end before it, plus one at the first. One o is 1.
 (2) Z does not fall with p, and Z[v,p] ≤ Z[u,p] for every edge.
 (3) z[l,p] is at most the sum of y over the placements from p on which l is possible within U: alone, and with all work
     that must come before or behind it. A placement in use has at least one layer.
 (4) c and w are shares. Compute plus the exposed part of synchronisation is at most T and at most U·y; so is
     synchronisation plus the exposed part of compute.
 (5) b[k,p] ≥ Z[u,p] - Z[v,p] for every consumer v. The cut p is the same for all workers of a placement, because no
     stage starts inside it.
 (6) Exactly one λ[p,n] is 1 unless no stage lies behind p. Below the outermost level this takes a placement over p that
     begins and ends within the component around p, and one behind p that ends in this component. Where servers differ,
     the links on the ways of both placements up to level n must be as fast as those of λ.
 (7) e[p,n] ≤ U·λ[p,n]. The bytes over p are the sum of e[p,n] times the rates. The sum of e[p,n] is at most T.

Depths are added only if the solution without them does not hold with them: if a worker's memory is too small, or two
weight versions are too few (2BW). The optimum without depths is then a lower bound L on T.

    δ[ρ,d] ∈ {0,1}   a stage with d minibatches in flight is on ρ; one δ with recomputation and one without
    t[ρ,d] ≥ 0       = T·δ[ρ,d]
    g[ρ] ≥ 0         the stage's wait for its group (`formulas.group_wait` · T)
    m[ρ,d] ≥ 0       shares of what the memory of a stage holds d times

 (8) One δ[ρ,d] is 1 for a placement in use. L·δ ≤ t ≤ U·δ, and t adds up to T over the placements that hold a worker.
 (9) g[ρ] is at least the all-reduce of its group less T (with m copies of the pipeline: r - 1/m times T; 2BW: none).
(10) Where placements meet, (d-1)·r·t of the one before is at least d·r·t + g of the one behind, plus its own g and
     twice the transfer: `formulas.in_flight_depth` times T. 2BW: the all-reduces are at most (M + 1/m - d·r)·t
     (`formulas.buffered_pace`).
(11) Weights, gradients, optimiser state, buffers, a workspace of at least that of every l times z[l,p], and d·m over
     all d fit the device; m[ρ,d] ≤ memory/d · δ[ρ,d].

A stage that recomputes has its forward work twice in (4); in (11) its saved bytes and its output count once. Under
vertical sync the versions of the weights follow from the input stage: `vertical_versions` has (29) and (30).

With a flush the objective differs: `flush` has it in (12) to (15), and `shared_weights` copies of weights in (20). T in
(8) to (10) is then the pace within a batch, and a stage that holds all minibatches of an update is exempt from (10).

For a uniform grid (`Options.grid`) only the placements of some grid are candidates, and for each shape of S stages with
r replicas there is

    q[S,r] ∈ {0,1}   the grid has this shape

(16) One q is 1, and y[ρ] is the sum of q over the shapes that ρ is part of.
(17) Constraints of the user. Stages are counted by y and busy workers by r·y; a layer pinned to stage i has
     Z[l,p] = [i or more stages start by p]. Layers that must share a stage are joined beforehand (`layers`).

With parallel boundaries, λ and e exist for each number of links, which takes as many replicas on both sides.

(18) C is at least T. With copies of the pipeline it is at least T and their synchronisation, joined by the overlap.

The rest is charged only with contention (`Options.contention`); `charged` and `cards` have it.

    f[ρ], h[π] ≥ 0   bytes behind the stage on ρ and before the stage on π, for each direction of messages
    k[p,c] ≥ 0       bytes over cut p, in both directions, that stay inside a component c around it

(19) C ≥ wait · (y[ρ] + o[s] - 1) for every ρ behind which no stage follows: if both are 1, ρ has the only stage, and
     its next forward pass waits for the update. The wait is a constant, as the stage holds all layers.
(20) f[ρ] ≤ most·y[ρ], and h likewise. For every cut, the sum of f over the placements that hold the worker before it is
     the sum of b times the bytes. Where placements meet, the sums of f and h are the same. `least_crossing` has a lower
     bound on f for a placement in use.
(21) k[p,c] is at most the bytes over p times the share of the stage's workers inside c, on either side of p.
(22) Where both stages reach beyond c, a flow for every pair of placements gives the share of the pair. These are added
     where a solution shows that they matter.
(23) C is at least what a card is busy with: for each direction, the shares of f and h of the workers inside, less k,
     plus the rings that leave the component once.
(24) C is at least the work of a server's workers, and the exposed part of their all-reduces, over the cores they share.

Where the executor's own work is charged (`Cluster.executor`), it adds to c in (4), (12), (13) and (24):

    x[π] ≥ 0         the executor's work at π

(25) x[π] is at least the passes of a stage on π, the messages of its boundaries (o and the placements behind which no
     stage follows say whether there is one before and one behind), the bytes over both cuts, and the copies of w[π]
     where a stage follows.

Choices of stages
-----------------
`choices` enumerates the stages that a plan within U may have, each with whole sets of layers at both ends, for graphs
of up to `closed_sets.MOST_SETS` such sets (a chain of 449 layers, say). Only their places are candidates, and Z is a
constant where all of them agree; the depths that they can have are the only ones in (8). Up to
`stage_choices.MOST_CHOICES` of them are variables too, in (26) to (28) of `stage_choices`. Where no choices make a
pipeline, there is no plan up to U and no program: before the first program the lower bound is raised as far as that
goes (`space_search`). This is the one part that looks for paths over sets of layers, as the dynamic program does; it
shares no code with it.

Upper bound
-----------
The formulation has nearly no big-M terms, so its relaxation is tight if U is close to the optimum. The program is
therefore solved for U a little above the bound that all work on all workers gives, and for larger U as long as it is
infeasible. The last of these programs is the proof, because it includes all plans up to its U. If another solver's
objective is given as a cut-off, that is U. If the time is too short for this proof, its last quarter goes to programs
with a smaller U, which are far easier: each that is infeasible gives a lower bound.

Limits
------
The program refuses problems with too many placements or depths (on some 40 workers and more, unless choices leave
few). It then has the bound that choices give.
"""

from __future__ import annotations

import time
from dataclasses import replace

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention, formulas
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import exchange_times, plain_data_parallel
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import TRAITS
from pipeplan.problem.grid_shapes import data_parallel_grid_size, grid_shapes
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.constraints.charged import Charges
from pipeplan.solvers.ilp.facts.placement_facts import minibatches_per_update, most_executor_work_s
from pipeplan.solvers.ilp.milp import backend
from pipeplan.solvers.ilp.space_search import CUTOFF_SLACK, IlpLimits, SpaceAnswer, SpaceSearch
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline, OutOfTime

__all__ = ["IlpLimits", "solve"]


def solve(problem: Problem, limits: IlpLimits, cutoff_s: float | None = None) -> Result:
    """The best plan over all spaces of plans.

    `cutoff_s` excludes slower plans from the search (with a margin of `CUTOFF_SLACK`). The verdict stays independent of
    the solver that found the cut-off: the program must still find a plan of its own and prove that there is no better.
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
        """The best solution: its pace by the program's coefficients, and its plan."""
        self.seen: tuple[float, Plan] | None = None
        """The fastest plan that the evaluator scored."""
        self.proven = True
        self.interrupted = False
        self.refusal = ""
        """The reason why some space was not searched, or an empty text."""
        self.bound = float("inf")
        self.known = None if cutoff_s is not None else _data_parallel(problem)
        """Pace and plan of plain data parallelism if that plan is allowed, else None."""
        known_s = self.known[0] if self.known else float("inf")
        self.upper = (cutoff_s if cutoff_s is not None else known_s) * (1 + CUTOFF_SLACK)
        # No plan is faster than all work on all workers, or cores. A search that is stopped proves no more than that.
        self.floor_s = max(
            problem.work_s / problem.cluster.total_speed, contention.least_pace_of_shared_cores_s(problem)
        )
        self.size = (0, 0)
        self.left: list[SpaceSearch] = []
        """The searches of the spaces that are still to be searched."""

    def run(self) -> None:
        """Search all spaces. Below another solver's pace all lower bounds are raised before the first program, which
        may take all of the time."""
        self.left = [search for space in plan_spaces(self.problem) if (search := self._prepared(space)) is not None]
        if self.cutoff_s is not None:
            for search in self.left:
                search.narrow()
        while self.left:
            self._search_next()

    def stop(self) -> None:
        """Leave out the spaces that have not been searched, because Ctrl-C came."""
        self.interrupted = True
        self.leave_out()

    def leave_out(self) -> None:
        """Leave out the spaces that have not been searched."""
        self.proven = False
        self.bound = min([self.bound, *(max(self.floor_s, search.low_s) for search in self.left)])
        self.left = []

    def _prepared(self, space: PlanSpace) -> SpaceSearch | None:
        """The search of a space; None where it has no plan below the upper bound."""
        charges = Charges(self.problem, space)
        if max(charges.least_pace_s(), space.floor(self.problem)) > self.upper:
            return None
        inner = charges.inner
        if minibatches_per_update(inner) == 0 or (inner.options.grid and not grid_shapes(inner)):
            return None
        low, high = self._bounds(charges)
        return SpaceSearch(charges, low, high, self.limits, self.deadline, self.cutoff_s is not None)

    def _search_next(self) -> None:
        """Search the next space for a plan that is better than the best so far."""
        if self.interrupted:
            self.stop()
            return
        search = self.left.pop(0)
        if self.best and self.best[0] <= self.floor_s * (1 + 1e-9):
            return  # All workers of the best plan are busy all the time, so nothing is better.
        if search.low_s > self.upper:
            return
        search.high_s = min(search.high_s, self.upper)
        try:
            self._take(search.run())
        except (KeyboardInterrupt, OutOfTime):
            self._take(search.answer)
            raise

    def _take(self, answer: SpaceAnswer) -> None:
        """Add what the search of one space found."""
        self._record_refusal(answer.refusal)
        self.proven &= answer.proven
        self.interrupted |= answer.interrupted
        self.size = max(self.size, answer.size)
        self.bound = min(self.bound, max(self.floor_s, answer.bound_s))
        if answer.seen and (self.seen is None or answer.seen[0] < self.seen[0]):
            self.seen = answer.seen
        if answer.best and (self.best is None or answer.best[0] < self.best[0] * (1 - 1e-9)):
            self.best = answer.best
        self.upper = min([self.upper, *(found[0] for found in (self.best, self.seen) if found)])

    def _bounds(self, charges: Charges) -> tuple[float, float]:
        """Lower and upper bound on the pace of the plans in a space that are worth finding."""
        inner, count = charges.inner, minibatches_per_update(charges.inner)
        slowest = _slowest_pace(inner)
        low = max(charges.space.floor(self.problem), charges.least_pace_s())
        if not self.problem.options.flushes or count is None:
            return low, min(self.upper, charges.space.pace(self.problem, slowest) + _most_shared(inner))
        fastest, splits = max(device.speed for device in inner.cluster.devices), TRAITS[inner.options.schedule].splits
        first = sum(one.forward_s + (0.0 if splits else one.backward_s - one.update_s) for one in inner.units) / fastest
        # The factor of `slowest` counts each boundary once for filling, and the slowest one for all minibatches.
        most = (count + inner.cluster.workers) * slowest / charges.scale + _most_shared(inner)
        most += 2 * inner.cluster.workers * sum(exchange_times(inner)) / charges.scale
        return max(low, first / charges.scale), min(self.upper, most)

    def _record_refusal(self, reason: str) -> bool:
        """Record the reason why a space cannot be searched. Returns whether there is one."""
        if reason:
            self.refusal, self.proven = reason, False
        return bool(reason)

    def result(self) -> Result:
        """The result over all spaces that were searched."""
        seconds = time.perf_counter() - self.began
        name = f"ILP ({backend.SOLVER_NAMES[self.limits.solver]})"
        limited = "the search was limited to plans within 1e-6 of the DP's objective" if self.cutoff_s else ""
        reason = self.refusal or ("it was stopped by Ctrl-C" if self.interrupted else "")
        bound = self.bound if self.bound < float("inf") else self.floor_s
        note = reason or "it found no plan within the time limit"
        nothing = Result(name, Status.TIME_LIMIT, None, float("inf"), bound, seconds, note, self.size, self.interrupted)
        nothing = replace(nothing, charged=True)
        if self.best is None and self.proven:
            return replace(nothing, status=Status.INFEASIBLE, bound_s=float("inf"), note=reason or limited)
        if self.proven and self.best is not None and self.limits.gap == 0:
            pace, plan = self.best
            return replace(
                nothing,
                status=Status.OPTIMAL,
                plan=plan,
                objective_s=pace,
                bound_s=min(self.bound, pace),
                note=reason or limited,
            )
        return self._unproven(nothing, reason)

    def _unproven(self, nothing: Result, reason: str) -> Result:
        """The result of a search that has not proven its plan optimal to a gap of 0; `nothing` is that without a plan.

        A search that was stopped may have a T above its plan's pace, or depths that do not fit in memory. So only plans
        that the evaluator has scored count.
        """
        if self.seen is None and not reason:
            reason = "it found no plan in time; plain data parallelism needs no search"
        if self.seen is None and (self.known is None or self.refusal):
            return nothing
        pace, plan = self.seen or self.known or (float("inf"), None)
        bound = min(self.bound if self.bound < float("inf") else self.floor_s, pace)
        return replace(nothing, status=Status.FEASIBLE, plan=plan, objective_s=pace, bound_s=bound, note=reason)


def _data_parallel(problem: Problem) -> tuple[float, Plan] | None:
    """Pace and plan of plain data parallelism if that plan is allowed and fits in memory, else None."""
    options = problem.options
    workers = min(options.max_replicas or problem.cluster.workers, options.max_workers or problem.cluster.workers)
    workers = min(workers, problem.cluster.workers)
    if options.grid:
        workers = data_parallel_grid_size(problem, workers)
    if options.stages not in (None, 1) or any(number != 1 for _, number in options.pins):
        return None
    plan = plain_data_parallel(problem, workers)
    score = evaluate(plan, problem)
    return (score.pace_s, plan) if score.fits else None


def _slowest_pace(problem: Problem) -> float:
    """Upper bound on the pace of a good plan of one pipeline, in seconds per minibatch: all work, with forward passes
    twice, on the slowest worker, and all synchronisation and traffic exposed."""
    allreduce, transfer = _longest_transfers(problem)
    speed = min(device.speed for device in problem.cluster.devices)
    # The most that 2BW needs with as many minibatches in flight as there may be (`formulas.buffered_pace`).
    buffered = problem.copies * (allreduce + problem.copies_allreduce_s)
    own = problem.cluster.workers * most_executor_work_s(problem)
    return 2 * problem.work_s / speed + own + 2 * (allreduce + transfer) + buffered


def _most_shared(problem: Problem) -> float:
    """Upper bound on the load of a card and of shared cores, in seconds per minibatch.

    At most two stages and four boundaries are on both sides of a card. Shared cores do all work and all all-reduces.
    """
    allreduce, transfer = _longest_transfers(problem)
    speed = min(device.speed for device in problem.cluster.devices)
    cores = 2 * problem.work_s / speed + problem.cluster.workers * (allreduce + most_executor_work_s(problem))
    return 4 * (allreduce + transfer + problem.copies_allreduce_s) + cores


def _longest_transfers(problem: Problem) -> tuple[float, float]:
    """Seconds of an all-reduce of the whole model, and of a message of all its tensors, over the slowest links."""
    links, workers = Links.of(problem.cluster), problem.cluster.workers
    rate = links.allreduce_bandwidth[-1], links.allreduce_latency[-1]
    size = problem.parameter_bytes
    allreduce = max(float(formulas.ring_allreduce_time(count, size, *rate)) for count in range(1, workers + 1))
    traffic = sum(flow.bytes + flow.gradient_bytes for flow in problem.flows)
    transfer = formulas.transfer_time(traffic, links.sendrecv_bandwidth[-1], links.sendrecv_latency[-1])
    return allreduce, float(transfer)

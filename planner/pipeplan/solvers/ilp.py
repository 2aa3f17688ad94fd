"""The same problem as an integer linear program on the layers of the DAG, through PuLP.

It shares the cost formulas with the dynamic program and nothing else: no cuts, no ideals, no order of the layers.

Notation. Layers l, edges (u, v), tensors k with producer u and consumers V. Workers 0 … D-1 in a row. A placement π is
a run of r consecutive workers that starts at s; sync(π) is the all-reduce over the level that π spans.

    x[l,π] ∈ {0,1}   layer l is on placement π            y[π] ∈ {0,1}   π holds a stage
    b[k,q] ∈ [0,1]   tensor k crosses the cut of all that is finished by worker q
    λ[q,n] ∈ {0,1}   the stage that ends at worker q sends to the next one over level n
    T ≥ 0            seconds per minibatch, to be minimised

(1) every layer has one placement, and a used placement has a layer.
(2) layers only on used placements, and used placements are disjoint.
(3) along an edge the start never decreases: for every worker p, [v starts by p] ≤ [u starts by p]. Stages are disjoint
    runs, so that the order of starts is the order of stages.
(4) compute plus the exposed part of synchronisation, and the other way round, are at most T on every placement. As the
    left side is linear in x for a known r, no product appears. With an upper bound U on T the same sums are at most
    U·y[π], which is what makes the relaxation tight.
(5) b[k,q] ≥ [u finished by q] - [v finished by q] for every consumer v.
(6) where a stage ends at q and something follows, one λ[q,n] holds; λ[q,≤n] only if that stage, and some later stage,
    lies within the component of level n around q.
(7) bytes over q, each direction, take at most T at the rate of the level: linear but for the choice of n, which a big M
    releases.
Memory, only where it can bind, adds the in-flight depth:
    δ[π,d] ∈ {0,1}   π holds a stage with d minibatches in flight
    W[π] ≥ 0         its wait for a group, in seconds (`cost.group_wait` · T)
    K[p] ≥ 0         what the first stage that starts at worker p or later demands (`cost.in_flight_behind` · T)
(8) one d for a used π.
(9) W[π] is at least the all-reduce of its group less T (with copies of the pipeline: r - 1/m times T). K[p] is at least
    r·d·T + W[π] for a stage that starts at p with depth d, and at least K[p+1] for a worker without a stage.
(10) (d-1)·r·T ≥ K behind the stage + W[π] + twice the transfer at the chosen level, where δ[π,d] and something follows:
     `cost.in_flight_depth` times T, which makes it linear, as d is known.
(11) weights, gradient, state, buffers, and d times (a version of the weights, what backward needs, input and output)
     fit the device; a replicated stage adds its buckets, and a version unless it is the only stage.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipeplan import cost
from pipeplan.evaluate import evaluate
from pipeplan.links import Links
from pipeplan.plan import Plan, data_parallel
from pipeplan.problem import Problem
from pipeplan.solvers import backend, depths
from pipeplan.solvers.ilp_model import Model
from pipeplan.solvers.pipeline import spaces
from pipeplan.solvers.result import Result, Status

# How far above a bound that another solver gave the program still looks for plans: a bound that is too low shows as
# "infeasible", one that is too high as a better plan.
CUTOFF_SLACK = 1e-6


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
    began = time.perf_counter()
    best: tuple[float, Plan] | None = None
    # No plan is faster than all work on all workers; a stopped search proves no more than that.
    floor_s = problem.work_s / (problem.cluster.workers * problem.cluster.device.speed)
    bound, proven = float("inf"), True
    upper = cutoff_s * (1 + CUTOFF_SLACK) if cutoff_s is not None else _known_upper(problem)
    for space in spaces(problem):
        ceiling = min(upper, best[0]) if best else upper
        if space.synchronisation(problem) > ceiling:
            continue
        remaining = None if limits.seconds is None else max(0.1, limits.seconds - (time.perf_counter() - began))
        inner = space.inner(problem)
        model = Model(inner, min(ceiling * space.copies, _slowest(inner)))
        answer = backend.run(model.program, limits.solver, remaining, limits.gap)
        proven &= answer.proven
        if answer.bound < float("inf"):
            bound = min(bound, max(floor_s, space.pace(problem, answer.bound * model.unit_s)))
        if answer.found and (best is None or space.pace(problem, model.objective()) < best[0] * (1 - 1e-9)):
            pace = space.pace(problem, model.objective())
            plan = space.plan(problem, model.segments())
            best = (pace, depths.assign(plan, problem, pace * (1 + CUTOFF_SLACK / 10)))
    seconds = time.perf_counter() - began
    name = f"ILP ({backend.NAMES[limits.solver]})"
    note = "searched below the DP's objective (plus 1e-6) only; plan and bound are its own" if cutoff_s else ""
    if best is None:
        status = Status.INFEASIBLE if proven else Status.TIME_LIMIT
        return Result(name, status, None, float("inf"), float("inf") if proven else min(bound, floor_s), seconds, note)
    if proven and limits.gap == 0:
        return Result(name, Status.OPTIMAL, best[1], best[0], min(bound, best[0]), seconds, note)
    # A search that was stopped need not have brought T down to what its plan is worth, nor its depths into memory.
    score = evaluate(best[1], problem)
    if not score.fits:
        return Result(name, Status.TIME_LIMIT, None, float("inf"), min(bound, score.alone_s), seconds, note)
    return Result(name, Status.FEASIBLE, best[1], score.alone_s, min(bound, score.alone_s), seconds, note)


def _known_upper(problem: Problem) -> float:
    """The pace of plain data parallelism where that is a plan that may be returned; else no bound is known."""
    if problem.options.stages not in (None, 1) or (problem.options.max_replicas or problem.cluster.workers) < 2:
        return float("inf")
    workers = min(problem.options.max_replicas or problem.cluster.workers, problem.cluster.workers)
    plan = data_parallel(problem.layer_names, workers, inference=problem.options.inference)
    score = evaluate(plan, problem)
    return score.alone_s if score.fits else float("inf")


def _slowest(problem: Problem) -> float:
    """More than any plan of one pipeline need take: all work on one worker, all synchronisation and traffic exposed."""
    links, workers = Links.of(problem.cluster), problem.cluster.workers
    bandwidth, latency = links.allreduce_bandwidth[-1], links.allreduce_latency[-1]
    size = sum(unit.parameter_bytes for unit in problem.units)
    allreduce = max(float(cost.ring_allreduce_time(count, size, bandwidth, latency)) for count in range(1, workers + 1))
    traffic = sum(flow.bytes + flow.gradient_bytes for flow in problem.flows)
    transfer = cost.transfer_time(traffic, links.sendrecv_bandwidth[-1], links.sendrecv_latency[-1])
    return problem.work_s / problem.cluster.device.speed + 2 * (allreduce + float(transfer))

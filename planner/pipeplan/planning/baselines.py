"""Plans that need little search: data parallelism, plain or with divided weights, and the best uniform grid."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.cost.evaluate import Evaluation, evaluate, memory_excess_message
from pipeplan.cost.sharded_data_parallel import shard_groups
from pipeplan.cost.stage_times import grid_shape_of, plain_data_parallel
from pipeplan.plan.plan import Plan
from pipeplan.plan.updates import Updates
from pipeplan.planning.figure import Figure
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.budget import SearchEffort
from pipeplan.solvers.dp.cut_selection import cheap_cuts
from pipeplan.solvers.result import Result
from pipeplan.util.deadline import NO_DEADLINE, Deadline


def listed_plan(problem: Problem) -> tuple[Plan, Evaluation] | None:
    """The best plan of a problem whose plans are listed (`Options.is_listed`), with its score; None if it has no plan.

    The plan's workers divide the weights, or take unequal shares of the batch. The workers recompute only if memory
    requires it.
    """
    if problem.options.unequal_shares:
        plans = unequal_plans(problem)
    else:
        plans = [plan for plan in [_on_most_workers(problem)] if plan is not None]
    for again in (False, True) if problem.options.recompute else (False,):
        ways = [replace(plan, stages=(replace(plan.stages[0], recompute=again),)) for plan in plans]
        scored = [(one, evaluate(one, problem)) for one in ways]
        fitting = [(one, score) for one, score in scored if score.fits or not problem.options.memory]
        if fitting:
            return min(fitting, key=lambda pair: pair[1].step_time_s)
    return None


def unequal_plans(problem: Problem) -> list[Plan]:
    """Data parallelism with shares of the batch by speed, on the fastest 2, 3, … workers.

    Workers of the same speed are all used or all left out. Workers whose memory is too small for the model are left
    out. The result is empty if workers share cores, because the speed of each worker then depends on the others.
    """
    cluster, count = problem.cluster, problem.options.accumulate or 1
    if cluster.uniform or cluster.shared_cores:
        return []
    speed = [device.speed for device in cluster.devices]
    fastest_first = sorted(range(cluster.workers), key=lambda worker: -speed[worker])
    enough = sorted({cluster.memory_of([worker]) for worker in fastest_first}) if problem.options.memory else [0]
    plans = []
    for least in enough:
        able = [worker for worker in fastest_first if cluster.memory_of([worker]) >= least]
        ends = [end for end in range(2, len(able) + 1) if speed[able[end - 1]] != speed[able[end % len(able)]]]
        for end in ends:
            workers = tuple(sorted(able[:end]))
            shares = shares_by_speed([speed[worker] for worker in workers], count)
            if min(shares) > 0 and len(set(shares)) > 1:
                plain = plain_data_parallel(problem, len(workers))
                plans.append(replace(plain, stages=(replace(plain.stages[0], workers=workers, shares=shares),)))
    return [plan for plan in dict.fromkeys(plans) if satisfies_options(plan, problem)]


def shares_by_speed(speeds: Sequence[float], count: int) -> tuple[int, ...]:
    """Microbatches for each worker, `count` in total, such that the last worker finishes as early as possible."""
    shares = [0] * len(speeds)
    next_ends = [(1 / speed, number) for number, speed in enumerate(speeds)]
    heapq.heapify(next_ends)
    for _ in range(count):
        _, number = next_ends[0]
        shares[number] += 1
        heapq.heapreplace(next_ends, ((shares[number] + 1) / speeds[number], number))
    return tuple(shares)


def _on_most_workers(problem: Problem) -> Plan | None:
    """Data parallelism on the most workers that divide the microbatches equally; None if no two workers can.

    Under HSDP the workers fill whole servers of equal size."""
    microbatches = problem.options.accumulate or 1
    for workers in range(min(problem.cluster.workers, microbatches), 1, -1):
        if microbatches % workers:
            continue
        plan = plain_data_parallel(problem, workers)
        sizes = {len(group) for group in shard_groups(plan, problem)}
        alike = problem.options.sharding == Sharding.FULL or (len(sizes) == 1 and max(sizes) > 1)
        if alike and satisfies_options(plan, problem):
            return plan
    return None


def why_not_listed(problem: Problem) -> str:
    """Why a problem whose plans are listed has no plan, in one line."""
    if problem.options.unequal_shares:
        return "unequal shares: no two workers whose speeds differ have memory for the whole model"
    plan = _on_most_workers(problem)
    if plan is None:
        where = " of equally large servers" if problem.options.sharding == Sharding.HYBRID else ""
        return f"{problem.options.sharding}: no two or more workers{where} have equally many of the microbatches"
    if problem.options.recompute:
        plan = replace(plan, stages=(replace(plan.stages[0], recompute=True),))
    return f"{problem.options.sharding} on {plan.busy} workers: {memory_excess_message(evaluate(plan, problem))}"


PARALLEL, UNIFORM_GRID = "data parallelism", "best uniform grid"
NO_TIME = "there was no time left to search for it; give more with --time-limit"
STOPPED = "not searched for, as Ctrl-C came before"
MOST_CELLS, MOST_WORKERS = 20_000, 1024
"""Limits of the search for a grid. If cuts times workers exceeds the first, only a selection of cuts is searched. With
more workers than the second, no grid is searched for."""
ON_SELECTION = "among a selection of the cuts; --grid searches all"
MOST_EFFORT = 1_000_000
"""Largest effort of the search for a grid, in table rows (`SearchEffort`). A row takes about a microsecond."""


@dataclass(frozen=True)
class Baseline:
    """A simple plan for comparison.

    `step_time_s` is its step time by the formulas, in seconds per minibatch; None without a plan.
    """

    name: str
    step_time_s: float | None
    config: str = ""
    remark: str = ""
    plan: Plan | None = None
    """The stages of the baseline."""
    fits: bool = True
    """Whether the baseline fits in memory. If it does not fit, no gain over it is given."""
    figure: Figure | None = None
    """The figure (simulated step time) of the baseline; None without a plan, or if it was not asked for."""

    @property
    def step_s(self) -> float | None:
        """The step time of the baseline, in seconds per minibatch; None without a plan."""
        return self.step_time_s if self.figure is None else self.figure.step_s

    def gain(self, step_s: float) -> float | None:
        """The speed-up over this baseline of a plan with the given step time.

        The result is None if either time is unknown or zero, or if the baseline does not fit in memory.
        """
        return None if self.step_s is None or step_s == 0 or not self.fits else self.step_s / step_s


def unsearched_baselines(problem: Problem, remark: str, others: Sequence[str] = ()) -> list[Baseline]:
    """The baselines without a search: data parallelism, then the grid and `others`, each as a name with a remark."""
    names = (*(() if problem.options.grid else (UNIFORM_GRID,)), *others)
    return [data_parallelism(problem), *(Baseline(name, None, "", remark) for name in names)]


def data_parallelism(problem: Problem) -> Baseline:
    """The baseline with the whole model on every worker, with a remark if it does not fit in memory."""
    parallel = plain_data_parallel(problem, problem.cluster.workers)
    score = evaluate(parallel, problem)
    if not math.isfinite(score.step_time_s):
        return Baseline(PARALLEL, None, parallel.config, f"an update of {parallel.accumulate} minibatches is too short")
    fits = score.fits or not problem.options.memory
    remark = "" if fits else f"does not fit in memory: {memory_excess_message(score)}"
    return Baseline(PARALLEL, score.step_time_s, parallel.config, remark, parallel, fits)


def uniform_grid(
    problem: Problem,
    cuts: Cuts,
    deadline: Deadline = NO_DEADLINE,
    useful_s: float = float("inf"),
    *,
    near: bool = False,
) -> Baseline:
    """The fastest uniform grid: the same number of replicas in every stage, as in most trainers.

    Grids with a step time of `useful_s` seconds per minibatch or more are not searched for; `near` says that the best
    grid is probably about that fast. If a search among all cuts would take long, only a selection of cuts is searched,
    and the remark says so. Raises `KeyboardInterrupt` on Ctrl-C.
    """
    if problem.cluster.workers > MOST_WORKERS:
        return Baseline(UNIFORM_GRID, None, "", "not searched for, as there are many workers; --grid searches for it")
    grids = replace(problem, options=replace(problem.options, grid=True, allow_copies=False, stages=None))
    remark = ""
    grid_effort = SearchEffort(MOST_EFFORT)
    if len(cuts.ideals) * problem.cluster.workers > MOST_CELLS:
        cuts, remark = cuts.only(cheap_cuts(cuts)), ON_SELECTION

    def searched() -> Result:
        left_s = deadline.left_s
        return dynamic_program.solve(grids, cuts, left_s, effort=grid_effort, useful_s=useful_s, near=near)

    result = searched()
    selected = cuts.only(cheap_cuts(cuts))
    if grid_effort.over and len(selected.ideals) < len(cuts.ideals) and not result.interrupted:
        cuts, remark, grid_effort = selected, ON_SELECTION, SearchEffort(MOST_EFFORT)
        result = searched()
    if result.interrupted:
        raise KeyboardInterrupt
    if deadline.passed:
        return Baseline(UNIFORM_GRID, None, "", NO_TIME)
    if grid_effort.over:
        return Baseline(UNIFORM_GRID, None, "", "the search was cut short to save time; --grid completes it")
    plan = result.plan
    if plan is None:
        fits = "no uniform grid was found" if remark else "no uniform grid fits in memory"
        return Baseline(UNIFORM_GRID, None, "", f"{fits} {remark}".strip())
    shape = grid_shape_of(plan, problem.cluster)
    return Baseline(UNIFORM_GRID, evaluate(plan, grids).step_time_s, shape.text if shape else "", remark, plan)


def not_taken_because(baseline: Baseline, plan: Plan, step_s: float, problem: Problem) -> str:
    """Why a baseline was not taken although it is faster than the plan, in a few words; empty if it is not faster.

    Such a baseline is outside the space that was searched. `step_s` is the step time of the plan, in seconds per
    minibatch.
    """
    gain, size = baseline.gain(step_s), problem.profile.minibatch
    if baseline.plan is None or gain is None or gain >= 1 or plan.inference:
        return ""
    if Updates.of(plan, size).synchronous and not Updates.of(baseline.plan, size).synchronous:
        return "asynchronous, unlike this plan"
    return "" if satisfies_options(baseline.plan, problem) else "your constraints rule it out"


def satisfies_options(plan: Plan, problem: Problem) -> bool:
    """Whether a plan satisfies the constraints of the options.

    Limits on replicas apply to each copy of the pipeline.
    """
    options, count = problem.options, len(plan.stages)
    stage_of = {name: number for number, stage in enumerate(plan.stages, start=1) for name in stage.layers}
    return (
        options.stages in (None, count)
        and count <= (options.max_stages or count)
        and plan.busy <= (options.max_workers or plan.busy)
        and all(stage.replicas // plan.copies <= (options.max_replicas or stage.replicas) for stage in plan.stages)
        and all(stage_of[name] == number for name, number in options.pins)
        and (not options.grid or grid_shape_of(plan, problem.cluster) is not None)
    )

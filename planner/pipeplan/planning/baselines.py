"""The baselines that a plan is compared with: data parallelism, on all workers and on the subset that is fastest, the
best uniform grid, the best straight pipeline, and the same straight pipeline without pipelining (model parallelism)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.evaluate import evaluate, memory_excess_message
from pipeplan.cost.stage_times import grid_shape_of, plain_data_parallel
from pipeplan.plan.plan import Plan
from pipeplan.plan.updates import Updates
from pipeplan.planning.stated.pace import NOT_SIMULATED, PlanSimulation
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.budget import SearchEffort
from pipeplan.solvers.dp.cuts.selected_cuts import cheap_cuts
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import NO_DEADLINE, Deadline

PARALLEL, ON_FEWER = "data parallelism", "data parallelism on fewer workers"
UNIFORM_GRID, STRAIGHT, UNPIPELINED = "best uniform grid", "best straight pipeline", "model parallelism"
FASTEST = "fastest plan"
"""The plan that is fastest by the formulas, where another was taken."""
NO_TIME = "there was no time left to search for it; give more with --time-limit"
STOPPED = "not searched for, as Ctrl-C came before"
IN_TIME = "the best that was found in time"
LEAST_DIFFERENCE = 1e-6
"""Relative. Data parallelism on fewer workers is told where it is faster by more."""
MOST_CELLS, MOST_WORKERS = 20_000, 1024
"""The largest product of cuts and workers for which the search for a grid is among all cuts, and the most workers for
which it is made."""
ON_SELECTION = "among a selection of the cuts; --grid searches all"
MOST_EFFORT = 1_000_000
"""Effort that the search for a grid may take (`SearchEffort` counts rows; one takes about a microsecond)."""


@dataclass(frozen=True)
class Baseline:
    """A simple way to use the cluster. `pace_s` is by the formulas, in seconds per minibatch; None without a plan."""

    name: str
    pace_s: float | None
    config: str = ""
    remark: str = ""
    plan: Plan | None = None
    """The stages of the baseline."""
    fits: bool = True
    """Whether it fits in memory. What does not fit is no plan that another one could be faster than."""
    simulation: PlanSimulation = NOT_SIMULATED
    """The simulated pace of the baseline, or why there is none."""

    @property
    def stated_s(self) -> float | None:
        """The pace that is stated for it, in seconds per minibatch: simulated where that differs from the formulas."""
        return None if self.pace_s is None else self.simulation.pace_s(self.pace_s)

    def gain(self, stated_s: float) -> float | None:
        """The speed-up over this baseline, as it is stated, of a plan with the given stated pace.

        It is None where either pace is unknown or zero, and where the baseline does not fit in memory.
        """
        return None if self.stated_s is None or stated_s == 0 or not self.fits else self.stated_s / stated_s


def uniform_baselines(problem: Problem, cuts: Cuts, deadline: Deadline = NO_DEADLINE) -> list[Baseline]:
    """The baselines with as many replicas in every stage: data parallelism, on all workers and on the subset that is
    fastest, and the best uniform grid.

    Data parallelism is scored even where it does not fit in memory, with a remark. A baseline that is not found before
    the deadline has a remark that says so. Raises `KeyboardInterrupt` on Ctrl-C.
    """
    everyone = data_parallelism(problem)
    found = [everyone, *fewer_workers(problem, cuts, everyone, deadline.share(0.2))]
    return found if problem.options.grid else [*found, uniform_grid(problem, cuts, deadline)]


def unsearched_baselines(
    problem: Problem, remark: str, others: Sequence[str] = (STRAIGHT, UNPIPELINED)
) -> list[Baseline]:
    """The baselines without a search for any: data parallelism, and the grid and others by name, with a remark."""
    names = (*(() if problem.options.grid else (UNIFORM_GRID,)), *others)
    return [data_parallelism(problem), *(Baseline(name, None, "", remark) for name in names)]


def straight_pipelines(problem: Problem, cuts: Cuts, deadline: Deadline = NO_DEADLINE) -> list[Baseline]:
    """The best straight pipeline, and the same one without pipelining; a remark says where Ctrl-C came before."""
    try:
        straight = dynamic_program.solve(problem.straight(), cuts, deadline.left_s)
    except KeyboardInterrupt:
        return [Baseline(STRAIGHT, None, "", STOPPED), Baseline(UNPIPELINED, None, "", STOPPED)]
    if straight.interrupted:
        return [Baseline(STRAIGHT, None, "", STOPPED), Baseline(UNPIPELINED, None, "", STOPPED)]
    if straight.plan is None:
        remark = "no straight pipeline fits in memory" if straight.status == Status.INFEASIBLE else NO_TIME
        return [Baseline(STRAIGHT, None, "", remark), Baseline(UNPIPELINED, None, "", remark)]
    # The evaluator scores one straight pipeline; with copies it would be replicated.
    pace, config = evaluate(straight.plan, problem).pace_s, straight.plan.config
    remark = "" if straight.status == Status.OPTIMAL or not deadline.passed else IN_TIME
    unpipelined, alone = unpipelined_time(straight.plan, problem), "the same stages, not pipelined"
    return [
        Baseline(STRAIGHT, pace, config, remark, straight.plan),
        Baseline(UNPIPELINED, unpipelined, config, alone, straight.plan),
    ]


def data_parallelism(problem: Problem) -> Baseline:
    """The whole model on every worker, with a remark where it does not fit in memory."""
    parallel = plain_data_parallel(problem, problem.cluster.workers)
    score = evaluate(parallel, problem)
    if not math.isfinite(score.pace_s):
        return Baseline(PARALLEL, None, parallel.config, f"an update of {parallel.accumulate} minibatches is too short")
    fits = score.fits or not problem.options.memory
    remark = "" if fits else f"does not fit in memory: {memory_excess_message(score)}"
    return Baseline(PARALLEL, score.pace_s, parallel.config, remark, parallel, fits)


def fewer_workers(problem: Problem, cuts: Cuts, everyone: Baseline, deadline: Deadline) -> list[Baseline]:
    """The fastest data parallelism on some of the workers, if it is faster than on `everyone`, else nothing.

    Raises `KeyboardInterrupt` on Ctrl-C.
    """
    options = replace(problem.options, stages=1, max_stages=None, max_replicas=None, allow_copies=False, pins=())
    found = dynamic_program.solve(replace(problem, options=options), cuts, deadline.left_s)
    if found.interrupted:
        raise KeyboardInterrupt
    if found.plan is None:
        return []
    pace_s = evaluate(found.plan, problem).pace_s
    if everyone.fits and everyone.pace_s is not None and pace_s >= everyone.pace_s * (1 - LEAST_DIFFERENCE):
        return []
    remark = f"{found.plan.busy} of {problem.cluster.workers} workers"
    return [Baseline(ON_FEWER, pace_s, found.plan.config, remark, found.plan)]


def uniform_grid(
    problem: Problem,
    cuts: Cuts,
    deadline: Deadline = NO_DEADLINE,
    useful_s: float = float("inf"),
    *,
    near: bool = False,
) -> Baseline:
    """The fastest uniform grid, which has the same number of replicas in every stage, as in most trainers.

    Grids with at least the pace `useful_s`, in seconds per minibatch, are not searched for; `near` says that the best
    is probably about that fast. Where a search among all cuts would take long, it is among a selection of them, which
    the remark says. Raises `KeyboardInterrupt` on Ctrl-C.
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
    return Baseline(UNIFORM_GRID, evaluate(plan, problem).pace_s, shape.text if shape else "", remark, plan)


def unpipelined_time(plan: Plan, problem: Problem) -> float:
    """Seconds per minibatch of a straight plan with a single minibatch in flight: all compute and transfers in turn."""
    links = Links.of(problem.cluster)
    total = 0.0
    for index, stage in enumerate(evaluate(plan, problem).stages):
        total += stage.forward_s + stage.backward_s
        for size in (stage.boundary_bytes, stage.boundary_gradient_bytes):
            if size:
                both = plan.stages[index].workers + plan.stages[index + 1].workers
                total += float(formulas.transfer_time(size, *links.sendrecv_among(both)))
    return total


def not_taken_because(baseline: Baseline, plan: Plan, stated_s: float, problem: Problem) -> str:
    """Why a baseline was not taken although it is faster than the plan, in a few words: it is outside the space that
    was searched.

    `stated_s` is the stated pace of the plan, in seconds per minibatch. Empty where the baseline is not faster.
    """
    gain, size = baseline.gain(stated_s), problem.profile.minibatch
    if baseline.plan is None or gain is None or gain >= 1 or plan.inference:
        return ""
    if Updates.of(plan, size).synchronous and not Updates.of(baseline.plan, size).synchronous:
        return "asynchronous, unlike this plan"
    return "" if satisfies_options(baseline.plan, problem) else "your constraints rule it out"


def satisfies_options(plan: Plan, problem: Problem) -> bool:
    """Whether a plan satisfies the constraints of the options. Limits on replicas refer to one copy of the pipeline."""
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

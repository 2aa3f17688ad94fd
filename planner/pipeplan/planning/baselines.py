"""The baselines that a plan is compared with: data parallelism, the best uniform grid, the best straight pipeline, and
the same straight pipeline without pipelining (model parallelism)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.evaluate import evaluate, memory_excess_message
from pipeplan.cost.stage_times import grid_shape_of, plain_data_parallel
from pipeplan.plan.plan import Plan
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.budget import SearchEffort

UNIFORM_GRID, UNPIPELINED = "best uniform grid", "model parallelism"
MOST_CELLS, MOST_WORKERS = 20_000, 256
"""The largest product of cuts and workers, and the most workers, for which the search for a grid is cheap beside the
search for the plan."""
LEAST_EFFORT, SHARE = 250_000, 0.2
"""Effort that the search for a grid may take (`SearchEffort` counts rows; one takes about a microsecond): this
number, or this share of the effort that the search for the plan took if that is more."""


@dataclass(frozen=True)
class Baseline:
    """A simple way to use the cluster. `pace_s` is in seconds per minibatch, None where no such plan was found."""

    name: str
    pace_s: float | None
    config: str = ""
    remark: str = ""
    plan: Plan | None = None
    """The stages of the baseline."""

    def gain(self, pace_s: float) -> float | None:
        """The speed-up of a plan with the given pace over this baseline; None where either pace is unknown or zero."""
        return None if self.pace_s is None or pace_s == 0 else self.pace_s / pace_s


def compute_baselines(problem: Problem, cuts: Cuts, effort: float = 0.0) -> list[Baseline]:
    """The baselines of a problem. Data parallelism is scored even where it does not fit in memory, with a remark.

    `effort` is what the search for the plan took (`Result.effort`); the search for a grid may take a share of that.
    """
    baselines = [data_parallelism(problem)]
    if not problem.options.grid:
        baselines.append(uniform_grid(problem, cuts, effort))
    straight_problem = problem.straight()
    straight = dynamic_program.solve(straight_problem, cuts)
    if straight.plan is None:
        remark = "no straight pipeline fits in memory"
        return [
            *baselines,
            Baseline("best straight pipeline", None, "", remark),
            Baseline(UNPIPELINED, None, "", remark),
        ]
    # The evaluator scores one straight pipeline; with copies it would be replicated.
    pace = evaluate(straight.plan, problem).pace_s
    baselines.append(Baseline("best straight pipeline", pace, straight.plan.config, plan=straight.plan))
    unpipelined, remark = unpipelined_time(straight.plan, problem), "the same stages, not pipelined"
    return [*baselines, Baseline(UNPIPELINED, unpipelined, straight.plan.config, remark, straight.plan)]


def data_parallelism(problem: Problem) -> Baseline:
    """The whole model on every worker, with a remark where it does not fit in memory."""
    parallel, name = plain_data_parallel(problem, problem.cluster.workers), "data parallelism"
    score = evaluate(parallel, problem)
    if not math.isfinite(score.pace_s):
        return Baseline(name, None, parallel.config, f"an update of {parallel.accumulate} minibatches is too short")
    remark = "" if score.fits else f"does not fit in memory: {memory_excess_message(score)}"
    return Baseline(name, score.pace_s, parallel.config, remark, parallel)


def uniform_grid(problem: Problem, cuts: Cuts, effort: float = 0.0) -> Baseline:
    """The fastest uniform grid, which has the same number of replicas in every stage, as in most trainers.

    The result has no pace but a remark where the search would take too long beside a plan search of this `effort`.
    """
    if len(cuts.ideals) * problem.cluster.workers > MOST_CELLS or problem.cluster.workers > MOST_WORKERS:
        return Baseline(
            UNIFORM_GRID, None, "", "not searched for, as there are many cuts and workers; --grid searches for it"
        )
    options = replace(problem.options, grid=True, allow_copies=False, stages=None)
    grid_problem = replace(problem, options=options)
    grid_effort = SearchEffort(max(LEAST_EFFORT, effort * SHARE))
    result = dynamic_program.solve(grid_problem, cuts, effort=grid_effort)
    if grid_effort.over:
        return Baseline(UNIFORM_GRID, None, "", "the search was cut short to save time; --grid completes it")
    plan = result.plan
    if plan is None:
        return Baseline(UNIFORM_GRID, None, "", "no uniform grid fits in memory")
    shape = grid_shape_of(plan, problem.cluster)
    return Baseline(UNIFORM_GRID, evaluate(plan, problem).pace_s, shape.text if shape else "", plan=plan)


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

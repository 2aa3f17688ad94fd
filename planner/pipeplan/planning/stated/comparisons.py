"""States the paces of the plans that an answer is compared with: data parallelism, grids, straight pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan
from pipeplan.planning.baselines import UNPIPELINED, Baseline
from pipeplan.planning.stated.pace import MOST_PASSES, PlanSimulation, simulated
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import Deadline


def state_baselines(
    baselines: Iterable[Baseline], problem: Problem, plan: Plan, told: PlanSimulation, deadline: Deadline
) -> tuple[Baseline, ...]:
    """The baselines with what a simulation says of each, as far as a limit on the passes of all of them allows.

    One with the stages of the answer, `plan`, has what is `told` of that, so that a plan is never compared with itself
    at another depth. Where the answer was not simulated, nothing is. Model parallelism needs no simulation, as it has
    one minibatch at a time.
    """
    stated, passes = [], MOST_PASSES
    for one in baselines:
        if one.plan is None or one.pace_s is None or one.name == UNPIPELINED or told.simulated_s is None:
            stated.append(one)
        elif _same_stages(one.plan, plan):
            stated.append(replace(one, simulation=replace(told, rivals=())))
        else:
            found = simulated(one.name, one.plan, evaluate(one.plan, problem), problem, deadline, passes)
            passes -= found.passes
            stated.append(replace(one, simulation=PlanSimulation.of(found)))
    return tuple(stated)


def _same_stages(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same layers on the same workers, whatever their depths."""
    return one.copies == other.copies and [(stage.layers, stage.workers) for stage in one.stages] == [
        (stage.layers, stage.workers) for stage in other.stages
    ]

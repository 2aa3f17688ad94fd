"""Which gradients of weights the schedule zb-h1 defers, and how long they take (docs/cost-model.md, "Zero bubble")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeplan.cost import formulas
from pipeplan.cost.memory import worker_memory
from pipeplan.cost.stage_times import StageTimes
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import SPLITTING
from pipeplan.problem.problem import Problem


def weights_s(plan: Plan, problem: Problem, index: int) -> float:
    """The part of a stage's backward pass that action W takes, in seconds; 0 where the stage defers nothing.

    A profile has no time of its own for it. It is half of the backward pass of layers that have parameters.
    """
    stage = plan.stages[index]
    splits = not stage.recompute if plan.virtual else stage.deferred
    return _weight_gradients_s(problem, stage) if splits and plan.schedule in SPLITTING else 0.0


def defer_weights(plan: Plan, problem: Problem, times: Sequence[StageTimes]) -> Plan:
    """The plan with as many gradients of weights deferred at every stage as fill the time in which those before drain.

    A stage holds no more minibatches than the first one does under 1F1B, and no more than fit into its memory. A stage
    that recomputes defers nothing, because it would keep what it recomputes in order to drop.
    """
    assert plan.accumulate is not None
    first, draining_s = plan.stages[0], 0.0
    for index, time in enumerate(times):
        stage = plan.stages[index]
        pass_s, most = _weight_gradients_s(problem, stage), 0
        if pass_s > 0 and not stage.recompute:
            held = -(-min(first.depth * first.replicas, plan.accumulate) // stage.replicas)
            most = max(0, min(held - stage.depth, int(draining_s / pass_s + formulas.ROUNDING)))
        plan = _with_most_deferred(plan, problem, index, most)
        draining_s += time.backward_s - time.update_s + time.round_trip_s / 2
        draining_s -= weights_s(plan, problem, index)
    return plan


def _with_most_deferred(plan: Plan, problem: Problem, index: int, most: int) -> Plan:
    """The plan in which a stage defers at most `most` gradients, and no more than fit into its memory."""
    capacity = problem.memory_of(plan.stages[index].workers)
    for deferred in range(most, -1, -1):
        changed = replace(plan.stages[index], deferred=deferred)
        plan = replace(plan, stages=(*plan.stages[:index], changed, *plan.stages[index + 1 :]))
        if worker_memory(plan, problem, index)[0] <= capacity:
            break
    return plan


def _weight_gradients_s(problem: Problem, stage: Stage) -> float:
    names = set(stage.layers)
    layers = (layer for layer in problem.profile.layers if layer.name in names and layer.parameter_bytes)
    return sum(layer.backward_s for layer in layers) / 2 / problem.cluster.speed_of(stage.workers)

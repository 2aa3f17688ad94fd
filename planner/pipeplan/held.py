"""What a worker has to do and what it waits, by a plan: per minibatch that it computes."""

from __future__ import annotations

from pipeplan import cost
from pipeplan.evaluate import Evaluation
from pipeplan.links import Links
from pipeplan.plan import ACCUMULATING, Plan
from pipeplan.problem import Problem
from pipeplan.stages import group_allreduce_time


def exposed_s(plan: Plan, problem: Problem, score: Evaluation, index: int) -> float:
    """What of its all-reduces holds a replica of a stage up, s: all of them where nothing hides behind computing."""
    stage, replicas = score.stages[index], plan.stages[index].replicas
    if score.batch is not None:  # nothing is computed while a drained pipeline waits for its all-reduces
        allreduce = group_allreduce_time(plan, problem, Links.of(problem.cluster), index)
        return allreduce * replicas / (plan.accumulate or replicas)
    if plan.copies == 1 and not stage.synchronisation_s:
        return 0.0
    if len(plan.stages) == 1 and plan.schedule not in ACCUMULATING and not problem.cluster.shared_cores:
        # Plain data parallelism waits for nothing else.
        return max(0.0, replicas * score.pace_s - stage.forward_s - stage.backward_s)
    together = float(cost.overlapped(stage.stage_s / plan.copies, score.copies_s, problem.options.overlap))
    held = together * replicas - stage.forward_s - stage.backward_s
    return held if held > cost.ROUNDING * together else 0.0


def idle_s(plan: Plan, problem: Problem, score: Evaluation, index: int) -> float:
    """How long a replica of a stage is idle, s: replicas × pace less what it has to do."""
    stage = score.stages[index]
    work = stage.forward_s + stage.backward_s + exposed_s(plan, problem, score, index)
    return max(0.0, plan.stages[index].replicas * score.pace_s - work)

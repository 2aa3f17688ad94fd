"""Busy and idle time of a stage's replicas under a plan."""

from __future__ import annotations

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.evaluate import Evaluation
from pipeplan.cost.stage_times import group_allreduce_time
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.problem.problem import Problem


def exposed_allreduce_per_minibatch_s(plan: Plan, problem: Problem, score: Evaluation, index: int) -> float:
    """Exposed all-reduce time of one replica of stage `index`, in seconds per minibatch that it computes."""
    stage, replicas = score.stages[index], plan.stages[index].replicas
    if score.batch is not None:  # Nothing is computed while a drained pipeline waits for its all-reduces.
        allreduce = group_allreduce_time(plan, problem, Links.of(problem.cluster), index)
        return allreduce * replicas / (plan.accumulate or replicas)
    if plan.copies == 1 and not stage.synchronisation_s:
        return 0.0
    if len(plan.stages) == 1 and plan.schedule not in ACCUMULATING and not problem.cluster.shared_cores:
        # Plain data parallelism waits for nothing but its all-reduce.
        return max(0.0, replicas * score.step_time_s - stage.forward_s - stage.backward_s)
    together = float(formulas.overlapped(stage.stage_s / plan.copies, score.copies_s, problem.options.overlap))
    exposed = together * replicas - stage.forward_s - stage.backward_s
    return exposed if exposed > formulas.ROUNDING * together else 0.0


def idle_per_minibatch_s(plan: Plan, problem: Problem, score: Evaluation, index: int) -> float:
    """Idle time of one replica of stage `index`, in seconds per minibatch that it computes.

    This is replicas × step time less the forward and backward passes and the exposed all-reduce.
    """
    stage = score.stages[index]
    if plan.virtual:
        return virtual_idle_s(plan, problem, score, index)
    work = stage.forward_s + stage.backward_s + exposed_allreduce_per_minibatch_s(plan, problem, score, index)
    return max(0.0, plan.stages[index].replicas * score.step_time_s - work)


def virtual_idle_s(plan: Plan, problem: Problem, score: Evaluation, index: int) -> float:
    """A stage's share of the idle time of its workers, which run several stages."""
    own = [number for number, stage in enumerate(plan.stages) if stage.workers == plan.stages[index].workers]
    work = sum(score.stages[one].forward_s + score.stages[one].backward_s for one in own)
    work += sum(exposed_allreduce_per_minibatch_s(plan, problem, score, one) for one in own)
    return max(0.0, plan.stages[index].replicas * score.step_time_s - work) / len(own)

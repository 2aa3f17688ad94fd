"""The line of `pipeplan solve` on workers that stay idle because the executor's own work would cost more."""

from __future__ import annotations

from pipeplan.cost.evaluate import Evaluation
from pipeplan.plan.plan import Plan
from pipeplan.problem.problem import Problem
from pipeplan.util.units import show_time


def executor_lines(plan: Plan, score: Evaluation, problem: Problem) -> list[str]:
    """A line where the executor's work is charged and the plan leaves workers idle; otherwise nothing."""
    costs = problem.cluster.executor
    if not (costs.pass_s or costs.message_s) or plan.busy >= problem.cluster.workers:
        return []
    most_s = max(stage.executor_s for stage in score.stages)
    workers = f"{plan.busy} of {problem.cluster.workers} workers"
    own = f"the executor's own work takes {show_time(most_s)} of a minibatch at a stage"
    return [f"{workers}: no plan that was found on more of them is faster, as {own}"]

"""The plan of a problem whose replicas divide the weights: one stage, without a search."""

from __future__ import annotations

from dataclasses import replace

from pipeplan.cost.evaluate import Evaluation, evaluate, memory_excess_message
from pipeplan.cost.sharded_data_parallel import shard_groups
from pipeplan.cost.stage_times import plain_data_parallel
from pipeplan.plan.plan import Plan
from pipeplan.planning.baselines import satisfies_options
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem


def sharded_plan(problem: Problem) -> tuple[Plan, Evaluation] | None:
    """The plan with its score; None where no number of workers can share the microbatches, or memory is too short.

    Units recompute only where memory requires it.
    """
    plan = _on_most_workers(problem)
    if plan is None:
        return None
    again = replace(plan, stages=(replace(plan.stages[0], recompute=True),))
    for one in (plan, again) if problem.options.recompute else (plan,):
        score = evaluate(one, problem)
        if score.fits or not problem.options.memory:
            return one, score
    return None


def _on_most_workers(problem: Problem) -> Plan | None:
    """Data parallelism on the most workers that all have equally many microbatches; under HSDP on whole servers that
    are equally large, two at least."""
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


def why_not_sharded(problem: Problem) -> str:
    """Why a problem has no such plan, in one line."""
    plan = _on_most_workers(problem)
    if plan is None:
        where = " of equally large servers" if problem.options.sharding == Sharding.HYBRID else ""
        return f"{problem.options.sharding}: no two or more workers{where} have equally many of the microbatches"
    if problem.options.recompute:
        plan = replace(plan, stages=(replace(plan.stages[0], recompute=True),))
    return f"{problem.options.sharding} on {plan.busy} workers: {memory_excess_message(evaluate(plan, problem))}"

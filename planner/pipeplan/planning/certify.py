"""Chooses which certificate an answer gets."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.cost.evaluate import Evaluation
from pipeplan.planning.verdict import TOLERANCE
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.certificate import Certificate, covers_alone, make_certificate
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline


def certificate_of(
    problem: Problem, cuts: Cuts, results: Sequence[Result], score: Evaluation, deadline: Deadline
) -> Certificate:
    """The certificate of an answer that is proven optimal, or the reason why there is none.

    It covers the pace with everything charged where that is longer than the pace without shared resources and the wait
    of plain data parallelism, or where only such a certificate can cover the problem.
    """
    if problem.options.shard_optimizer:
        return Certificate(None, "no certificate covers plans whose replicas divide the optimiser's state")
    charged = problem.options.contention
    proven = [result.bound_s for result in results if result.status == Status.OPTIMAL and result.charged == charged]
    alone = [result.alone_bound_s for result in results if result.alone_bound_s is not None]
    bound = min([*proven, score.pace_s])
    if proven and not alone and score.pace_s <= score.alone_s * (1 + TOLERANCE):
        alone = proven
    if proven and (not alone or bound > max(alone) * (1 + TOLERANCE) or not covers_alone(problem)):
        return make_certificate(problem, cuts, bound, deadline, charged=True)
    if not alone:
        return Certificate(None, "the plan is not proven optimal")
    return make_certificate(problem, cuts, min(max(alone), score.alone_s), deadline)

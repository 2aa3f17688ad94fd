"""Proves the bound of an answer: which bound a certificate is made for."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.cost.evaluate import Evaluation
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.certificate import Certificate, make_certificate
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline


def certificate_of(
    problem: Problem, cuts: Cuts, results: Sequence[Result], score: Evaluation, deadline: Deadline
) -> Certificate:
    """The certificate of the bound that the solvers have proven, or the reason why there is none.

    Where plans are proven optimal, it is the least of their bounds, so that rounding asks for no better one.
    """
    proven = [result.bound_s for result in results if result.status == Status.OPTIMAL]
    bound_s = min(proven) if proven else max(result.bound_s for result in results)
    if bound_s <= 0:
        return Certificate(None, "no bound is proven")
    return make_certificate(problem, cuts, min(bound_s, score.pace_s), deadline)

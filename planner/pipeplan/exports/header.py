"""What every exported file says of itself: what made it, from which plan, for which version of the trainer."""

from __future__ import annotations

from pipeplan._version import __version__
from pipeplan.exports.target import Target
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.text import one_line


def header(to: Target, problem: Problem, plan: Plan) -> list[str]:
    """Lines of plain text, without line breaks or control characters whatever names contain, for a comment."""
    model, cluster = problem.profile.model_name or "a model without a name", problem.cluster.name
    accumulate = f", {plan.accumulate} minibatches per update" if plan.accumulate else ""
    said = f"minibatch {problem.profile.minibatch}, schedule {plan.schedule}{accumulate}"
    return [
        one_line(f"Made by pipeplan {__version__} for {to.title}."),
        one_line(f"The plan {plan.config} of {model} on {cluster}: {said}."),
    ]

"""The comment at the head of every exported file: its origin, its plan, and the version of the trainer."""

from __future__ import annotations

from pipeplan._version import __version__
from pipeplan.exports.target import Target
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.text import one_line


def header(to: Target, problem: Problem, plan: Plan) -> list[str]:
    """Lines for a comment, without control characters whatever the names contain."""
    model, cluster = problem.profile.model_name or "a model without a name", problem.cluster.name
    accumulate = f", {plan.accumulate} minibatches per update" if plan.accumulate else ""
    settings = f"minibatch {problem.profile.minibatch}, schedule {plan.schedule}{accumulate}"
    return [
        one_line(f"Made by pipeplan {__version__} for {to.title}."),
        one_line(f"The plan {plan.config} of {model} on {cluster}: {settings}."),
    ]

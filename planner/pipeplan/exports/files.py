"""The comment at the head of every exported file: its origin, its plan, and the version of the trainer.

Literals in generated Python.
"""

from __future__ import annotations

from pipeplan._version import __version__
from pipeplan.exports.target import ExportTarget
from pipeplan.plan.plan import Plan
from pipeplan.problem.problem import Problem
from pipeplan.util.text import one_line


def header_lines(to: ExportTarget, problem: Problem, plan: Plan) -> list[str]:
    """Lines for a comment, without control characters whatever the names contain."""
    model, cluster = problem.profile.model_name or "a model without a name", problem.cluster.name
    accumulate = f", {plan.accumulate} minibatches per update" if plan.accumulate else ""
    settings = f"minibatch {problem.profile.minibatch}, schedule {plan.schedule}{accumulate}"
    return [
        one_line(f"Made by pipeplan {__version__} for {to.title}."),
        one_line(f"The plan {plan.config} of {model} on {cluster}: {settings}."),
    ]


WIDTH = 88
"""Default line width of Python formatters."""


def python_literal(value: object) -> str:
    """A Python expression for a string, a number or a list of these, in the style of formatters."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(python_literal, value))}]"
    text = repr(value)
    if not isinstance(value, str) or '"' in text:
        return text
    return f'"{text[1:-1]}"'


def python_number_list(values: list[int] | tuple[int, ...], indent: int = 4) -> str:
    """A list of numbers inside another list: on one line if it fits, else with one number on each line."""
    line = python_literal(values)
    if indent + len(line) + 1 <= WIDTH:
        return line
    inner = " " * (indent + 4)
    return "[\n" + "".join(f"{inner}{value},\n" for value in values) + " " * indent + "]"

"""Parts of exported files: the comment at their head, Python literals, and the torchrun commands to start a script."""

from __future__ import annotations

import itertools

from pipeplan._version import __version__
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.exports.target import ExportTarget
from pipeplan.plan.plan import Plan
from pipeplan.problem.problem import Problem
from pipeplan.util.text import one_line

WIDTH = 88
"""Default line width of Python formatters."""


def header_lines(target: ExportTarget, problem: Problem, plan: Plan) -> list[str]:
    """Lines for a comment, without control characters whatever the names contain."""
    model, cluster = problem.profile.model_name or "a model without a name", problem.cluster.name
    accumulate = f", {plan.accumulate} minibatches per update" if plan.accumulate else ""
    settings = f"minibatch {problem.profile.minibatch}, schedule {plan.schedule}{accumulate}"
    return [
        one_line(f"Made by pipeplan {__version__} for {target.title}."),
        one_line(f"The plan {plan.config} of {model} on {cluster}: {settings}."),
    ]


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


def workers_per_used_server(cluster: Cluster, count: int) -> list[int]:
    """The number of the first `count` workers on each server, without the servers that have none."""
    ends = itertools.accumulate(cluster.server_sizes)
    return [
        min(end, count) - (end - size)
        for end, size in zip(ends, cluster.server_sizes, strict=True)
        if end - size < count
    ]


def torchrun_commands(cluster: Cluster, workers: int, script: str, *, before: str = "") -> list[str]:
    """The commands that start a script on workers 0, 1, … of a cluster, one for each size of server.

    `script` is quoted for the shell already. `before` precedes the command, such as `NAME=value`.
    """
    sizes = workers_per_used_server(cluster, workers)
    start = f"{before} torchrun".strip()
    if len(sizes) == 1:
        return [f"{start} --standalone --nproc-per-node {sizes[0]} {script}"]
    rest = "--node-rank RANK --master-addr HOST --master-port 29500"
    lines = []
    for size in dict.fromkeys(sizes):
        numbers = [str(index) for index, other_size in enumerate(sizes) if other_size == size]
        who = "every server" if len(numbers) == len(sizes) else f"server {', '.join(numbers)}"
        run = f"{start} --nnodes {len(sizes)} --nproc-per-node {size} {rest} {script}"
        lines.append(f"on {who} (RANK is its number from 0, HOST the first): {run}")
    return lines

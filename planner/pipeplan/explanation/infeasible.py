"""The diagnosis that `pipeplan explain` gives where no plan fits, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipeplan.drawing.tables import describe_cluster
from pipeplan.explanation.explain import document_head
from pipeplan.planning.infeasibility import Diagnosis
from pipeplan.problem.problem import Problem
from pipeplan.util.text import one_line
from pipeplan.util.units import show_size

MOST_LAYERS = 8


def diagnosis_parts(problem: Problem, diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Lines and a table on what does not fit, and on the changes that would make room for a plan."""
    profile, cluster = problem.profile, problem.cluster
    yield Text.assemble(
        ("No plan", "bold"),
        f" for {one_line(profile.model_name)}, minibatch {profile.minibatch}, on cluster "
        f"{one_line(cluster.name)} ({describe_cluster(cluster)})",
    )
    if diagnosis.oversized:
        yield _layers(diagnosis)
        left = len(diagnosis.oversized) - MOST_LAYERS
        if left > 0:
            yield f"and {left} more layers"
    enough = diagnosis.enough
    if enough is not None:
        yield (
            f"Least device memory that suffices: {show_size(enough.memory_bytes)} instead of "
            f"{show_size(enough.now_bytes)}{'' if diagnosis.uniform else ' (the smallest; others alike)'}; "
            f"stage {enough.stage} of {enough.plan.config} then needs all of it."
        )
    if diagnosis.growth is not None:
        growth = diagnosis.growth
        yield f"Fewest {growth.unit}s that would do: {growth.count} instead of {growth.now}."
    elif not diagnosis.oversized and not diagnosis.unfinished:
        yield "More workers alone would not do, as far as they were tried."
    for flag in diagnosis.relaxed:
        yield f"Without {flag} there is a plan."
    if diagnosis.unfinished:
        yield "There was no time to try everything that might help."


def _layers(diagnosis: Diagnosis) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("too large for any device", overflow="fold")
    for heading in ("needs", f"of {show_size(diagnosis.capacity_bytes)}, missing"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in diagnosis.oversized[:MOST_LAYERS]:
        name = (
            group.name if len(group.layers) == 1 else f"{group.name} and {len(group.layers) - 1} that must be with it"
        )
        table.add_row(Text(one_line(name)), show_size(group.needs_bytes), show_size(group.missing_bytes))
    return table


def diagnosis_json(problem: Problem, diagnosis: Diagnosis) -> dict[str, Any]:
    """The document that `pipeplan explain --json` prints where there is no plan."""
    enough, growth = diagnosis.enough, diagnosis.growth
    return document_head(problem, feasible=False) | {
        "why": diagnosis.text,
        "capacity_bytes": diagnosis.capacity_bytes if problem.options.memory else None,
        "oversized": [
            {"layers": list(group.layers), "needs_bytes": group.needs_bytes, "missing_bytes": group.missing_bytes}
            for group in diagnosis.oversized
        ],
        "enough_memory": None
        if enough is None
        else {"bytes": enough.memory_bytes, "config": enough.plan.config, "stage": enough.stage},
        "enough_machines": None if growth is None else {"unit": growth.unit, "count": growth.count, "now": growth.now},
        "relaxed": list(diagnosis.relaxed),
    }

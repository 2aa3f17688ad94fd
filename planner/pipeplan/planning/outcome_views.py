"""An outcome for Python: five lines, a table for notebooks, and rows for a data frame."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Protocol

from pipeplan.cost.evaluate import Evaluation
from pipeplan.plan.plan import Plan
from pipeplan.plan.updates import Updates
from pipeplan.planning.baselines import Baseline
from pipeplan.planning.verdict import Verdict
from pipeplan.problem.problem import Problem
from pipeplan.util.text import one_line
from pipeplan.util.units import show_pace, show_size, show_time


class _Outcome(Protocol):
    """The parts of an outcome that are shown (`pipeplan.planning.outcome`)."""

    @property
    def problem(self) -> Problem: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def evaluation(self) -> Evaluation: ...
    @property
    def predicted_s(self) -> float: ...
    @property
    def baselines(self) -> tuple[Baseline, ...]: ...
    @property
    def verdict(self) -> Verdict: ...


_COLUMNS = ("stage", "layers", "replicas", "servers", "depth", "compute", "sync", "to next", "memory")


def outcome_lines(outcome: _Outcome) -> list[str]:
    """The plan, its updates, its pace, its gains and the verdict: five lines without control characters."""
    plan, score, problem = outcome.plan, outcome.evaluation, outcome.problem
    minibatch, cluster = problem.profile.minibatch, problem.cluster
    purpose = "inference" if plan.inference else "training"
    updates = "Inference: the forward pass only." if plan.inference else Updates.of(plan, minibatch).text
    gains = [(one.name, one.gain(outcome.predicted_s)) for one in outcome.baselines]
    where = f"on cluster {cluster.name} ({plan.busy} of {cluster.workers} workers)"
    rate = 1 / outcome.predicted_s if outcome.predicted_s > 0 else float("inf")
    rates = f"{show_time(outcome.predicted_s)} each, {show_pace(rate * minibatch)} samples/s"
    bound = f"bound by {score.bound}" if outcome.predicted_s == score.pace_s else "simulated"
    known = ", ".join(f"{gain:.2f}x over {name}" for name, gain in gains if gain is not None)
    lines = (
        f"Plan {plan.config} for {purpose} {problem.profile.model_name}, minibatch {minibatch}, {where}",
        updates,
        f"Predicted: {show_pace(rate)} minibatches/s ({rates}), {bound}",
        f"Gains: {known or 'none known'}",
        f"Verdict: {outcome.verdict.text}",
    )
    return [one_line(line) for line in lines]


def stage_rows(outcome: _Outcome) -> list[dict[str, Any]]:
    """A row for each stage: its number from 1, its layers and workers, and its costs in seconds and bytes."""
    cluster = outcome.problem.cluster
    return [
        {
            "stage": number,
            "layers": list(stage.layers),
            "replicas": stage.replicas,
            "workers": list(stage.workers),
            "servers": sorted({cluster.server_of(worker) for worker in stage.workers}),
            "depth": stage.depth,
            "recompute": stage.recompute,
            **asdict(cost),
        }
        for number, (stage, cost) in enumerate(zip(outcome.plan.stages, outcome.evaluation.stages, strict=True), 1)
    ]


def outcome_html(outcome: _Outcome) -> str:
    """The five lines and a table of the stages, for a notebook."""
    first, *others = map(html.escape, outcome_lines(outcome))
    rows = [_cells("th", _COLUMNS), *(_cells("td", _shown(row)) for row in stage_rows(outcome))]
    return f"<p><b>{first}</b><br>{'<br>'.join(others)}</p><table>{''.join(rows)}</table>"


def _cells(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(one_line(cell))}</{tag}>' for cell in cells)}</tr>"


def _shown(row: dict[str, Any]) -> list[object]:
    layers = row["layers"]
    return [
        row["stage"],
        layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)})",
        row["replicas"],
        ", ".join(map(str, row["servers"])),
        row["depth"],
        show_time(row["compute_s"]),
        show_time(row["synchronisation_s"]),
        show_size(row["boundary_bytes"]) if row["boundary_level"] else "",
        show_size(row["memory_bytes"]),
    ]

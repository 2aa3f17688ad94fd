"""Measurements of a run, beside the predictions."""

from __future__ import annotations

from typing import Any

from pipeplan.run_data.run_folder import ALL_REDUCE, MeasuredRun
from pipeplan.util.files import Node
from pipeplan.util.text import one_line

COMPARED_FIGURES = ("forward_s", "backward_s", "update_s", "sync_s", "wait_s", "memory_bytes")
"""Figures of a stage that are both predicted and measured."""
MEASURED_FIGURES = ("load_s", "send_s", "other_s")
"""Figures of a stage that are only measured."""


def measured_section(run: MeasuredRun) -> dict[str, Any]:
    """The measured pace, the first cause of its difference from the prediction, and the figures of every stage."""
    summary = run.summary
    pace, cause = _pair(summary, "minibatch_s"), summary.get("cause")
    seconds = pace["measured"]
    return {
        "run": one_line(run.folder.name),
        "minibatch_s": seconds,
        "minibatches_per_s": 1 / seconds if seconds else None,
        "samples_per_s": summary["minibatch"].integer(minimum=1) / seconds if seconds else None,
        "ratio": pace["ratio"],
        "minibatches": summary["steady_minibatches"].integer(),
        "includes_fill": summary["includes_fill"].boolean(),
        "cause": one_line(cause["text"].text()) if cause else "",
        "stages": [_stage(node) for node in summary["stages"].items()],
    }


def _stage(node: Node) -> dict[str, Any]:
    workers = [worker.integer() for worker in node["workers"].items()]
    figures: dict[str, Any] = {"stage": node["stage"].integer(), "workers": workers}
    figures |= {name: _pair(node, name) for name in COMPARED_FIGURES}
    measured_only = node["measured"]
    return figures | {name: value.number() if (value := measured_only.get(name)) else None for name in MEASURED_FIGURES}


def _pair(node: Node, name: str) -> dict[str, float | None]:
    """Predicted and measured value of a figure, and their ratio."""
    pair = node.get(name)
    if pair is None:
        return {"predicted": None, "measured": None, "ratio": None}
    return {key: value.number() if (value := pair.get(key)) else None for key in ("predicted", "measured", "ratio")}


def allreduce_shares(run: MeasuredRun) -> dict[int, float]:
    """Share of the recorded time in which all-reduces of a stage ran, as the mean over its workers, by stage."""
    end_s = max((interval.end_s for timeline in run.timelines.values() for interval in timeline), default=0.0)
    shares: dict[int, list[float]] = {}
    for recorded in run.recorded.values():
        busy = sum(interval.duration_s for interval in recorded.intervals if interval.kind == ALL_REDUCE)
        shares.setdefault(recorded.stage, []).append(busy / end_s if end_s else 0.0)
    return {stage: sum(of_workers) / len(of_workers) for stage, of_workers in shares.items()}


def measured_peaks(run: MeasuredRun) -> dict[int, int]:
    """Measured peak memory of the fullest worker of every stage, in bytes, by stage."""
    sizes = {}
    for node in run.summary["stages"].items():
        size = _pair(node, "memory_bytes")["measured"]
        if size is not None:
            sizes[node["stage"].integer()] = round(size)
    return sizes

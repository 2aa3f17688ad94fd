"""Measurements of a run, beside the predictions."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from pipeplan.run_data.run_folder import ALL_REDUCE, MeasuredRun, StageSummary
from pipeplan.util.text import one_line

COMPARED_FIGURES = ("forward_s", "backward_s", "update_s", "sync_s", "wait_s", "memory_bytes")
"""Figures of a stage that are both predicted and measured."""
MEASURED_FIGURES = ("load_s", "send_s", "other_s")
"""Figures of a stage that are only measured."""


def measured_section(run: MeasuredRun) -> dict[str, Any]:
    """The measured pace, the first cause of its difference from the prediction, and the figures of every stage."""
    summary, pace = run.summary, run.summary.minibatch_s
    seconds = pace.measured
    return {
        "run": one_line(run.folder.name),
        "minibatch_s": seconds,
        "minibatches_per_s": 1 / seconds if seconds else None,
        "samples_per_s": summary.minibatch / seconds if seconds and summary.minibatch else None,
        "ratio": pace.ratio,
        "minibatches": summary.steady_minibatches,
        "includes_fill": summary.includes_fill,
        "cause": one_line(summary.cause.text) if summary.cause else "",
        "stages": [_stage(stage) for stage in summary.stages],
    }


def _stage(stage: StageSummary) -> dict[str, Any]:
    figures = {name: asdict(getattr(stage, name)) for name in COMPARED_FIGURES}
    figures |= {name: getattr(stage.measured, name) for name in MEASURED_FIGURES}
    return {"stage": stage.stage, "workers": list(stage.workers), **figures}


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
    sizes = {stage.stage: stage.memory_bytes.measured for stage in run.summary.stages}
    return {stage: round(size) for stage, size in sizes.items() if size is not None}

"""What a run measured, beside what was predicted."""

from __future__ import annotations

from typing import Any

from pipeplan.run_data.run_folder import ALL_REDUCE, MeasuredRun
from pipeplan.util.files import Node
from pipeplan.util.text import one_line

PAIRS = ("forward_s", "backward_s", "update_s", "sync_s", "wait_s", "memory_bytes")
ALONE = ("load_s", "send_s", "other_s")


def measured(run: MeasuredRun) -> dict[str, Any]:
    """The pace, the first cause of the difference, and every stage."""
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
    found: dict[str, Any] = {"stage": node["stage"].integer(), "workers": workers}
    found |= {name: _pair(node, name) for name in PAIRS}
    alone = node["measured"]
    return found | {name: one.number() if (one := alone.get(name)) else None for name in ALONE}


def _pair(node: Node, name: str) -> dict[str, float | None]:
    found = node.get(name)
    if found is None:
        return {"predicted": None, "measured": None, "ratio": None}
    return {key: one.number() if (one := found.get(key)) else None for key in ("predicted", "measured", "ratio")}


def allreduces(run: MeasuredRun) -> dict[int, float]:
    """Share of the recorded time in which all-reduces of a stage went on, mean over its workers."""
    end_s = max((one.end_s for found in run.timelines.values() for one in found), default=0.0)
    shares: dict[int, list[float]] = {}
    for recorded in run.recorded.values():
        busy = sum(one.duration_s for one in recorded.intervals if one.kind == ALL_REDUCE)
        shares.setdefault(recorded.stage, []).append(busy / end_s if end_s else 0.0)
    return {stage: sum(found) / len(found) for stage, found in shares.items()}


def peaks(run: MeasuredRun) -> dict[int, int]:
    """The measured peak of every stage's fullest worker, bytes."""
    found = {}
    for node in run.summary["stages"].items():
        size = _pair(node, "memory_bytes")["measured"]
        if size is not None:
            found[node["stage"].integer()] = round(size)
    return found

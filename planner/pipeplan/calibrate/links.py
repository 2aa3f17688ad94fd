"""What runs say of a cluster's links: efficiencies of all-reduces and of messages, by level, where they can be told."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan import cost
from pipeplan.calibrate.observed import Observed
from pipeplan.calibrate.waits import group_of, hides
from pipeplan.cluster import Cluster
from pipeplan.evaluate import Evaluation
from pipeplan.plan import FLUSHING

HIDDEN = 0.02
"""Share of a stage's computing: an all-reduce that holds workers up for less says nothing of its link where it can hide
behind computing."""
LEAST = 1e-4
"""No link is taken to be less efficient."""


@dataclass(frozen=True)
class Fitted:
    """One efficiency of one level."""

    level: str
    operation: str
    """`all-reduce` or `send/recv`."""
    before: float
    after: float
    why: str
    """Where it is from, or why it is as it was."""


def fit_allreduce(
    cluster: Cluster, runs: Sequence[Observed], sizes: Sequence[Sequence[int]]
) -> tuple[Cluster, list[Fitted]]:
    """The cluster with the all-reduces' efficiencies that the runs show. `sizes`: parameter bytes, by run and stage."""
    samples: dict[int, list[float]] = {}
    reasons: dict[int, str] = {}
    for run, parameters in zip(runs, sizes, strict=True):
        for index, stage in enumerate(run.plan.stages):
            if stage.replicas == 1 or run.plan.inference:
                continue
            number = cluster.level_between(min(stage.workers), max(stage.workers)) - 1
            found = _efficiency(cluster, run, index, parameters[index], number)
            if isinstance(found, str):
                reasons[number] = found
            else:
                samples.setdefault(number, []).append(found)
    levels, fitted = [], []
    for number, level in enumerate(cluster.levels):
        before, after = level.allreduce_efficiency, level.allreduce_efficiency
        why = reasons.get(number, "no stage had replicas across it")
        if number in samples:
            after, why = statistics.median(samples[number]), _told(samples[number])
        levels.append(replace(level, allreduce_efficiency=after))
        if level.count > 1:
            fitted.append(Fitted(level.name, "all-reduce", before, after, why))
    return (replace(cluster, levels=tuple(levels)) if samples else cluster), fitted


def fit_messages(
    cluster: Cluster, runs: Sequence[Observed], scores: Sequence[Evaluation]
) -> tuple[Cluster, list[Fitted]]:
    """The cluster with the messages' efficiencies that follow where a boundary bounds the pace of a run. `scores`: the
    runs' plans with the times that the runs measured, so that no stage needs longer."""
    samples: dict[int, list[float]] = {}
    for run, score in zip(runs, scores, strict=True):
        slowest = max(score.stages, key=lambda stage: stage.boundary_s)
        if cluster.uniform and slowest.boundary_s / run.plan.copies >= score.pace_s * (1 - cost.ROUNDING):
            number = slowest.boundary_level - 1
            before = cluster.levels[number].sendrecv_efficiency
            samples.setdefault(number, []).append(min(1.0, max(LEAST, before * score.pace_s / run.pace_s)))
    levels, fitted = [], []
    for number, level in enumerate(cluster.levels):
        before, after, why = level.sendrecv_efficiency, level.sendrecv_efficiency, "no boundary bounded the pace"
        if number in samples:
            after, why = statistics.median(samples[number]), "the boundary that bounded the pace"
        levels.append(replace(level, sendrecv_efficiency=after))
        if level.count > 1:
            fitted.append(Fitted(level.name, "send/recv", before, after, why))
    return (replace(cluster, levels=tuple(levels)) if samples else cluster), fitted


def _told(samples: Sequence[float]) -> str:
    return "what all-reduces held workers up" if len(samples) == 1 else f"the median of {len(samples)} stages"


def _efficiency(cluster: Cluster, run: Observed, index: int, size: int, number: int) -> float | str:
    """Of the level with this number, by the all-reduces of one stage; or why they do not say it."""
    plan, busy = run.plan, run.stages[index]
    if not cluster.uniform:
        return "servers differ, so that it cannot be told whose link it is"
    if plan.copies > 1:
        return "all-reduces inside copies of the pipeline and among them cannot be told apart"
    if hides(plan, index):
        return "its updates run late, so that all-reduces hide behind computing"
    if run.shared:
        return "workers share cores, so that waiting for a core and for a link cannot be told apart"
    replicas = plan.stages[index].replicas
    each = group_of(plan, index) / replicas  # minibatches of a replica for one all-reduce
    known = run.transfers_s[index] if run.transfers_s else None
    held = busy.sync_s * each if known is None else known
    # After a flush nothing hides them; else what hides them in plain data parallelism is the backward pass.
    overlap = 0.0 if plan.schedule in FLUSHING else run.options.overlap
    computing = busy.backward_s * each
    if overlap > 0 and held < HIDDEN * computing:
        return "they hide behind computing"
    group_s = held / (1 - overlap) if held <= (1 - overlap) * computing else held + overlap * computing
    level = cluster.levels[number]
    moved = float(cost.ring_allreduce_time(replicas, size, level.bandwidth, 0.0))
    latency = float(
        cost.ring_allreduce_time(replicas, 0, 1.0, max(one.latency_s for one in cluster.levels[: number + 1]))
    )
    if not moved:
        return "its stages have no parameters"
    if group_s - latency <= moved:
        return 1.0
    return max(LEAST, moved / (group_s - latency))

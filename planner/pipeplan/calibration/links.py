"""Fits the efficiencies of links for all-reduces and messages, by level, as far as runs determine them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeplan.calibration.measured_stages import ObservedRun, hides_allreduce, update_group
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.ddp_overlap import ddp_exposed_allreduce_s
from pipeplan.cost.evaluate import Evaluation
from pipeplan.cost.stage_times import group_allreduce_time
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSHING
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile

UNSURE = 0.01
"""Measurement error of an all-reduce's exposed time, as a share of the stage's backward pass."""
TELLING = 2.0
"""Largest factor by which the measurement error may change an efficiency that counts as determined."""
LEAST = 1e-4
"""Smallest efficiency of a link."""
CLOSE = 1e-9
"""Relative width at which bisection stops."""


@dataclass(frozen=True)
class FittedEfficiency:
    """One efficiency of one level, before and after the fit."""

    level: str
    operation: str
    """Name of the operation: `all-reduce` or `send/recv`."""
    before: float
    after: float
    why: str
    """The source of the new value, or the reason why the old value stays."""


def fit_allreduce(
    cluster: Cluster, runs: Sequence[ObservedRun], profiles: Sequence[Profile]
) -> tuple[Cluster, list[FittedEfficiency]]:
    """The cluster with the efficiencies of all-reduces that the runs determine.

    `profiles` has a profile for each run, with the measured times of the passes that hide all-reduces.
    """
    samples: dict[int, list[float]] = {}
    reasons: dict[int, str] = {}
    for run, profile in zip(runs, profiles, strict=True):
        for index, stage in enumerate(run.plan.stages):
            if stage.replicas == 1 or run.plan.inference:
                continue
            number = cluster.level_between(min(stage.workers), max(stage.workers)) - 1
            efficiency = _efficiency(cluster, run, index, profile, number)
            if isinstance(efficiency, str):
                reasons[number] = efficiency
            else:
                samples.setdefault(number, []).append(efficiency)
    held = "the time for which all-reduces held workers up"
    sources = {
        number: held if len(found) == 1 else f"the median of {len(found)} stages" for number, found in samples.items()
    }
    left = {number: reasons.get(number, "no stage had replicas across it") for number in range(len(cluster.levels))}
    return _with_efficiencies(cluster, "all-reduce", "allreduce_efficiency", samples, left | sources)


def fit_messages(
    cluster: Cluster, runs: Sequence[ObservedRun], scores: Sequence[Evaluation]
) -> tuple[Cluster, list[FittedEfficiency]]:
    """The cluster with the efficiencies of messages, for levels whose boundary bounds the step time of a run.

    `scores` has the scores of the runs' plans with the measured times, so that no stage takes longer than the boundary.
    """
    samples: dict[int, list[float]] = {}
    for run, score in zip(runs, scores, strict=True):
        slowest = max(score.stages, key=lambda stage: stage.boundary_s)
        if cluster.uniform and slowest.boundary_s / run.plan.copies >= score.step_time_s * (1 - formulas.ROUNDING):
            number = slowest.boundary_level - 1
            before = cluster.levels[number].sendrecv_efficiency
            samples.setdefault(number, []).append(min(1.0, max(LEAST, before * score.step_time_s / run.step_time_s)))
    reasons = {
        number: "the boundary that limited the step time" if number in samples else "no boundary limited the step time"
        for number in range(len(cluster.levels))
    }
    return _with_efficiencies(cluster, "send/recv", "sendrecv_efficiency", samples, reasons)


def _with_efficiencies(
    cluster: Cluster, operation: str, field: str, samples: Mapping[int, Sequence[float]], reasons: Mapping[int, str]
) -> tuple[Cluster, list[FittedEfficiency]]:
    """The cluster with each level's median of samples as its efficiency, and the fit of each level.

    `samples` and `reasons` are keyed by the index of a level."""
    levels, fitted = [], []
    for number, level in enumerate(cluster.levels):
        before = getattr(level, field)
        after = statistics.median(samples[number]) if number in samples else before
        changed: dict[str, Any] = {field: after}
        levels.append(replace(level, **changed))
        if level.count > 1:
            fitted.append(FittedEfficiency(level.name, operation, before, after, reasons[number]))
    return (replace(cluster, levels=tuple(levels)) if samples else cluster), fitted


def _efficiency(cluster: Cluster, run: ObservedRun, index: int, profile: Profile, number: int) -> float | str:
    """The efficiency of a level that one stage's all-reduces show, or the reason why they do not determine it."""
    plan, busy = run.plan, run.stages[index]
    stage = plan.stages[index]
    if not cluster.uniform:
        return "servers differ, so that it is not known whose link it is"
    if plan.copies > 1:
        return "all-reduces inside copies of the pipeline and among them cannot be told apart"
    if hides_allreduce(plan, index):
        return "its updates run late, so that all-reduces hide behind computing"
    if run.shared:
        return "workers share cores, so that waiting for a core and for a link cannot be told apart"
    if not any(layer.parameter_bytes for layer in profile.layers if layer.name in stage.layers):
        return "its stages have no parameters"
    per_replica = update_group(plan, index) / stage.replicas  # minibatches of a replica per all-reduce
    transfer = run.transfers_s[index] if run.transfers_s else None
    measured = busy.sync_s * per_replica if transfer is None else transfer
    problem = Problem(profile, cluster, run.options)

    def exposed_s(efficiency: float) -> float:
        links = Links.of(cluster)
        rates = list(links.rates)
        rate = np.array([cluster.levels[number].bandwidth * efficiency])
        rates[number + 1] = replace(rates[number + 1], allreduce=rate)
        return _exposed_s(plan, problem, index, replace(links, rates=tuple(rates)))

    if plan.schedule not in FLUSHING and run.options.overlap > 0:
        error = UNSURE * busy.backward_s * per_replica
        if _solve(exposed_s, measured - error) > TELLING * _solve(exposed_s, measured + error):
            return "the part that does not hide behind computing is too short to tell"
    return _solve(exposed_s, measured)


def _exposed_s(plan: Plan, problem: Problem, index: int, links: Links) -> float:
    """Exposed seconds of one all-reduce of a stage whose updates do not lag."""
    whole = group_allreduce_time(plan, problem, links, index)
    if plan.schedule in FLUSHING:  # the all-reduce does not overlap with computing
        return whole
    exposed = ddp_exposed_allreduce_s(plan, problem, links)
    return exposed + (1.0 - problem.options.overlap) * max(0.0, whole - exposed)


def _solve(exposed_s: Callable[[float], float], measured: float) -> float:
    """The efficiency, from `LEAST` to 1, at which the exposed time is as measured.

    The exposed time falls as the efficiency grows. The function has a kink wherever one more bucket becomes hidden, so
    bisection is used.
    """
    if exposed_s(1.0) >= measured:
        return 1.0
    low, high = LEAST, 1.0
    while high > low * (1 + CLOSE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if exposed_s(middle) >= measured else (low, middle)
    return math.sqrt(low * high)

"""What runs say of a cluster's links: efficiencies of all-reduces and of messages, by level, where they can be told."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeplan import cost
from pipeplan.awaited import exposed_allreduce_s
from pipeplan.calibrate.observed import Observed
from pipeplan.calibrate.waits import group_of, hides
from pipeplan.cluster_data import Cluster
from pipeplan.evaluate import Evaluation
from pipeplan.links import Links
from pipeplan.plan import FLUSHING, Plan
from pipeplan.problem import Problem
from pipeplan.profile_data import Profile
from pipeplan.stages import group_allreduce_time

UNSURE = 0.01
"""Share of a stage's backward pass by which what is left of an all-reduce behind it may be measured wrong."""
TELLING = 2.0
"""An efficiency is told where so much more or less of the pass changes it by no larger a factor."""
LEAST = 1e-4
"""No link is taken to be less efficient."""
CLOSE = 1e-9
"""Relative."""


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
    cluster: Cluster, runs: Sequence[Observed], profiles: Sequence[Profile]
) -> tuple[Cluster, list[Fitted]]:
    """The cluster with the all-reduces' efficiencies that the runs show. `profiles`: by run, with the times of passes
    that it measured, behind which its all-reduces hid."""
    samples: dict[int, list[float]] = {}
    reasons: dict[int, str] = {}
    for run, profile in zip(runs, profiles, strict=True):
        for index, stage in enumerate(run.plan.stages):
            if stage.replicas == 1 or run.plan.inference:
                continue
            number = cluster.level_between(min(stage.workers), max(stage.workers)) - 1
            found = _efficiency(cluster, run, index, profile, number)
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


def _efficiency(cluster: Cluster, run: Observed, index: int, profile: Profile, number: int) -> float | str:
    """Of the level with this number, by the all-reduces of one stage; or why they do not say it."""
    plan, busy = run.plan, run.stages[index]
    stage = plan.stages[index]
    if not cluster.uniform:
        return "servers differ, so that it cannot be told whose link it is"
    if plan.copies > 1:
        return "all-reduces inside copies of the pipeline and among them cannot be told apart"
    if hides(plan, index):
        return "its updates run late, so that all-reduces hide behind computing"
    if run.shared:
        return "workers share cores, so that waiting for a core and for a link cannot be told apart"
    if not any(layer.parameter_bytes for layer in profile.layers if layer.name in stage.layers):
        return "its stages have no parameters"
    each = group_of(plan, index) / stage.replicas  # minibatches of a replica for one all-reduce
    known = run.transfers_s[index] if run.transfers_s else None
    held = busy.sync_s * each if known is None else known
    problem = Problem(profile, cluster, run.options)

    def held_s(efficiency: float) -> float:
        return _held_s(plan, problem, index, _reaching(cluster, number, efficiency))

    if plan.schedule not in FLUSHING and run.options.overlap > 0:
        unsure = UNSURE * busy.backward_s * each
        if _where(held_s, held - unsure) > TELLING * _where(held_s, held + unsure):
            return "what of them does not hide behind computing is too short to tell"
    return _where(held_s, held)


def _held_s(plan: Plan, problem: Problem, index: int, links: Links) -> float:
    """How long one all-reduce of a stage whose updates are not late holds its workers up, s."""
    whole = group_allreduce_time(plan, problem, links, index)
    if plan.schedule in FLUSHING:  # nothing hides it
        return whole
    exposed = exposed_allreduce_s(plan, problem, links)
    return exposed + (1.0 - problem.options.overlap) * max(0.0, whole - exposed)


def _reaching(cluster: Cluster, number: int, efficiency: float) -> Links:
    """The links of a cluster, with all-reduces across one of its levels at a share of that level's bandwidth."""
    links = Links.of(cluster)
    rates = list(links.rates)
    rates[number + 1] = replace(rates[number + 1], allreduce=np.array([cluster.levels[number].bandwidth * efficiency]))
    return replace(links, rates=tuple(rates))


def _where(held_s: Callable[[float], float], held: float) -> float:
    """The efficiency, from `LEAST` to 1, at which workers are held up for so long: they are for less the higher it is.
    By bisection, as what is exposed has a kink wherever one more bucket hides."""
    if held_s(1.0) >= held:
        return 1.0
    low, high = LEAST, 1.0
    while high > low * (1 + CLOSE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if held_s(middle) >= held else (low, middle)
    return math.sqrt(low * high)

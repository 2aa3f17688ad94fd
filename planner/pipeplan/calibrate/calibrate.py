"""Runs in, a profile and a cluster out that predict what the runs measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeplan.calibrate import links
from pipeplan.calibrate.layers import Times, mean, spread, stretched, with_times
from pipeplan.calibrate.links import Fitted
from pipeplan.calibrate.observed import Observed
from pipeplan.cluster_data import Cluster
from pipeplan.errors import InputError
from pipeplan.evaluate import Evaluation, evaluate
from pipeplan.held import exposed_s
from pipeplan.problem import Problem
from pipeplan.profile_data import Profile

ROUNDS = 20
CLOSE = 1e-9
EXPLAINED = 0.01
"""Relative: what may be left of the difference."""


@dataclass(frozen=True)
class Calibrated:
    """The result."""

    profile: Profile
    """With the new times; its provenance is as it was."""
    cluster: Cluster
    fitted: tuple[Fitted, ...]
    slack: float
    """By how much all layers' times are stretched for what is in no stage's time: the stages wait for each other."""
    paces_s: tuple[float, ...]
    """Of every run's plan, as it is predicted now."""
    unexplained: str
    """What bounds the pace whatever the layers take, where that is so; else empty."""


def calibrate(runs: Sequence[Observed], profile: Profile, cluster: Cluster) -> Calibrated:
    """Fit the times of `profile` and the efficiencies of `cluster` to the runs, all of plans of both.

    Links come first: the efficiency of all-reduces. Then the layers' times, so that with what links are charged with
    every stage is as busy as it was, in the mean over the runs. Where a boundary then bounds a pace, its efficiency
    follows from that. What is left of the measured paces is in no stage's time: bubbles, jitter. All layers are
    stretched alike for it, which changes the pace and not which plan is best.
    """
    inference = runs[0].plan.inference
    if any(run.plan.inference != inference for run in runs):
        raise InputError("some of these runs trained and others did not: calibrate by either")
    cluster, fitted = links.fit_allreduce(cluster, runs, [_measured(run, profile, cluster) for run in runs])
    times = _times(runs, profile, cluster)
    cluster, more = links.fit_messages(cluster, runs, _scores(runs, with_times(profile, times), cluster))
    slack = 1.0
    for _ in range(ROUNDS):
        scores = _scores(runs, with_times(profile, stretched(times, slack, inference=inference)), cluster)
        off = _off(runs, scores)
        if abs(off - 1) < CLOSE:
            break
        slack *= off
    unexplained = "" if abs(off - 1) < EXPLAINED else scores[0].bound
    slack = 1.0 if unexplained else slack
    new = with_times(profile, stretched(times, slack, inference=inference))
    paces = tuple(score.pace_s for score in _scores(runs, new, cluster))
    return Calibrated(new, cluster, (*fitted, *more), slack, paces, unexplained)


def _scores(runs: Sequence[Observed], profile: Profile, cluster: Cluster) -> list[Evaluation]:
    scores = [evaluate(run.plan, Problem(profile, cluster, run.options)) for run in runs]
    for run, score in zip(runs, scores, strict=True):
        if not 0 < score.pace_s < math.inf:
            raise InputError(f"the plan of run {run.name} keeps no pace at its depths: solve again with --force")
    return scores


def _off(runs: Sequence[Observed], scores: Sequence[Evaluation]) -> float:
    """Measured over predicted pace, the geometric mean over the runs."""
    logs = [math.log(run.pace_s / score.pace_s) for run, score in zip(runs, scores, strict=True)]
    return math.exp(math.fsum(logs) / len(logs))


def _times(runs: Sequence[Observed], profile: Profile, cluster: Cluster) -> Mapping[str, Times]:
    """The mean over the runs of what each says of all layers."""
    return mean([_times_of(run, profile, cluster) for run in runs])


def _times_of(run: Observed, profile: Profile, cluster: Cluster) -> dict[str, Times]:
    """What a run says of all layers. What an all-reduce is charged with beside computing may depend on that: so it is
    found again with the times that it gives, a few times over."""
    speeds = [cluster.speed_of(stage.workers) for stage in run.plan.stages]
    held = [busy.sync_s for busy in run.stages]
    for _ in range(3):
        times = spread(run, profile, speeds, held)
        problem = Problem(with_times(profile, times), cluster, run.options)
        score = evaluate(run.plan, problem)
        held = [exposed_s(run.plan, problem, score, index) for index in range(len(run.plan.stages))]
    return spread(run, profile, speeds, held)


def _measured(run: Observed, profile: Profile, cluster: Cluster) -> Profile:
    """The profile with the passes as a run measured them, and nothing that held its workers up besides."""
    speeds = [cluster.speed_of(stage.workers) for stage in run.plan.stages]
    return with_times(profile, spread(run, profile, speeds, [busy.own_s + busy.sync_s for busy in run.stages]))

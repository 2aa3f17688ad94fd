"""Calibration of a profile and a cluster to runs, so that they predict the measured paces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.calibration import links
from pipeplan.calibration.layers import LayerTimes, layer_times, mean_times, stretched_times, with_times
from pipeplan.calibration.links import FittedEfficiency
from pipeplan.calibration.measured_stages import ObservedRun
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.idle_time import exposed_allreduce_per_minibatch_s
from pipeplan.errors import InputError
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile

ROUNDS = 20
CLOSE = 1e-9
EXPLAINED = 0.01
"""Relative difference of the paces that may remain after the fit."""


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration."""

    profile: Profile
    """The profile with the new times and the old provenance."""
    cluster: Cluster
    fitted: tuple[FittedEfficiency, ...]
    slack: float
    """Factor on all layers' times for the time in which no stage is busy and the stages wait for each other."""
    paces_s: tuple[float, ...]
    """Predicted seconds per minibatch of every run's plan, with the new times."""
    unexplained: str
    """The resource that bounds the pace independently of the layers' times; empty where none does."""


def calibrate(runs: Sequence[ObservedRun], profile: Profile, cluster: Cluster) -> Calibrated:
    """Fit the times of `profile` and the efficiencies of `cluster` to the runs, all of plans of both.

    The efficiency of all-reduces is fitted first. The layers' times follow such that each stage is as busy as it was
    measured, including the predicted all-reduces, in the mean over the runs. Where a boundary then bounds a pace, its
    efficiency follows from that pace. The remaining difference is time in which no stage is busy, such as bubbles and
    jitter. All layers are stretched by one factor for it, which changes the pace but not which plan is best. Raises
    `InputError` for a mixture of training and inference runs, and for a plan whose depths are too small.
    """
    inference = runs[0].plan.inference
    if any(run.plan.inference != inference for run in runs):
        raise InputError("some of these runs trained and others did not: calibrate by either")
    cluster, fitted = links.fit_allreduce(cluster, runs, [_with_measured_passes(run, profile, cluster) for run in runs])
    times = mean_times([_times_of(run, profile, cluster) for run in runs])
    cluster, more = links.fit_messages(cluster, runs, _scores(runs, with_times(profile, times), cluster))
    slack = 1.0
    for _ in range(ROUNDS):
        scores = _scores(runs, with_times(profile, stretched_times(times, slack, inference=inference)), cluster)
        off = _mean_error(runs, scores)
        if abs(off - 1) < CLOSE:
            break
        slack *= off
    unexplained = "" if abs(off - 1) < EXPLAINED else scores[0].bound
    slack = 1.0 if unexplained else slack
    new = with_times(profile, stretched_times(times, slack, inference=inference))
    paces = tuple(score.pace_s for score in _scores(runs, new, cluster))
    return Calibrated(new, cluster, (*fitted, *more), slack, paces, unexplained)


def _scores(runs: Sequence[ObservedRun], profile: Profile, cluster: Cluster) -> list[Evaluation]:
    scores = [evaluate(run.plan, Problem(profile, cluster, run.options)) for run in runs]
    for run, score in zip(runs, scores, strict=True):
        if not 0 < score.pace_s < math.inf:
            raise InputError(f"the plan of run {run.name} has no steady state at its depths: solve again with --force")
    return scores


def _mean_error(runs: Sequence[ObservedRun], scores: Sequence[Evaluation]) -> float:
    """Measured over predicted pace: the geometric mean over the runs."""
    logs = [math.log(run.pace_s / score.pace_s) for run, score in zip(runs, scores, strict=True)]
    return math.exp(math.fsum(logs) / len(logs))


def _times_of(run: ObservedRun, profile: Profile, cluster: Cluster) -> dict[str, LayerTimes]:
    """The times of all layers by one run.

    The predicted exposed time of an all-reduce depends on the layers' times, so that the two are iterated.
    """
    speeds = [cluster.speed_of(stage.workers) for stage in run.plan.stages]
    exposed = [busy.sync_s for busy in run.stages]
    for _ in range(3):
        times = layer_times(run, profile, speeds, exposed)
        problem = Problem(with_times(profile, times), cluster, run.options)
        score = evaluate(run.plan, problem)
        exposed = [
            exposed_allreduce_per_minibatch_s(run.plan, problem, score, index) for index in range(len(run.plan.stages))
        ]
    return layer_times(run, profile, speeds, exposed)


def _with_measured_passes(run: ObservedRun, profile: Profile, cluster: Cluster) -> Profile:
    """The profile with the passes as a run measured them, without all other time of its workers."""
    speeds = [cluster.speed_of(stage.workers) for stage in run.plan.stages]
    return with_times(profile, layer_times(run, profile, speeds, [busy.own_s + busy.sync_s for busy in run.stages]))

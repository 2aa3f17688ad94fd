"""Calibration of a profile and a cluster to runs, so that they predict the measured step times.

A stage's measured times are distributed over its layers in proportion to the times in the profile. For a stage with
forward f, backward b and step u in the profile, and F, B, U measured:

    forward of a layer   its own · (F + o F / (F + B)) / f    plus, at one layer, the time of reading samples: at the
                                                              stage's first layer, or the last layer of the last stage
    backward             its own · (B + o B / (F + B)) / b
    step                 its own · U / u

Here o is all other busy time of a replica (sending tensors, the executor itself, waiting for all-reduces) minus the
predicted exposed time of all-reduces. Plans are charged for o through the layers of their stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.calibration import links
from pipeplan.calibration.links import FittedEfficiency
from pipeplan.calibration.measured_stages import ObservedRun
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import Evaluation, evaluate, exposed_allreduce_per_minibatch_s
from pipeplan.errors import InputError
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import TIMES, Layer
from pipeplan.profile_data.profile import Profile

Times = NDArray[np.float64]
"""The times of all layers (rows) in seconds per minibatch on a worker of speed 1: forward, backward and step."""
LEAST = 0.2
"""Smallest share of a stage's measured passes that its layers get, even if the predicted all-reduces are large."""
ROUNDS = 20
CLOSE = 1e-9
EXPLAINED = 0.01
"""Relative difference between step times that may remain after the fit."""


@dataclass(frozen=True)
class Calibrated:
    """The result of a calibration."""

    profile: Profile
    """The profile with the new times and the old provenance."""
    cluster: Cluster
    fitted: tuple[FittedEfficiency, ...]
    slack: float
    """Factor on all layers' times that accounts for the time in which all stages wait for each other."""
    step_times_s: tuple[float, ...]
    """Predicted seconds per minibatch of the plan of every run, with the new times."""
    unexplained: str
    """The resource that bounds the step time if no factor on the layers' times explains the step time; else empty."""


def calibrate(runs: Sequence[ObservedRun], profile: Profile, cluster: Cluster) -> Calibrated:
    """Fit the times of `profile` and the efficiencies of `cluster` to runs of plans for both.

    The efficiency of all-reduces is fitted first. The layers' times are then set so that each stage, including the
    predicted all-reduces, is as busy as measured on average. If a boundary then bounds a step time, the boundary's
    efficiency is fitted to that time. The remaining difference is time in which no stage is busy, such as bubbles and
    jitter. One factor on all layers' times accounts for this difference, and does not change which plan is best. Raises
    `InputError` for a mixture of training and inference runs, and for a plan whose depths are too small.
    """
    inference = runs[0].plan.inference
    if any(run.plan.inference != inference for run in runs):
        raise InputError("some of these runs trained and others did not: name runs of one kind")
    cluster, fitted = links.fit_allreduce(cluster, runs, [_with_measured_passes(run, profile, cluster) for run in runs])
    times = np.mean([_times_of(run, profile, cluster) for run in runs], axis=0)
    cluster, more = links.fit_messages(cluster, runs, _scores(runs, with_times(profile, times), cluster))
    slack = 1.0
    for _ in range(ROUNDS):
        scores = _scores(runs, with_times(profile, times * _stretch(slack, inference)), cluster)
        # Geometric mean over the runs of measured divided by predicted step time.
        logs = [math.log(run.step_time_s / score.step_time_s) for run, score in zip(runs, scores, strict=True)]
        off = math.exp(math.fsum(logs) / len(logs))
        if abs(off - 1) < CLOSE:
            break
        slack *= off
    unexplained = "" if abs(off - 1) < EXPLAINED else scores[0].bound
    slack = 1.0 if unexplained else slack
    new = with_times(profile, times * _stretch(slack, inference))
    step_times = tuple(score.step_time_s for score in _scores(runs, new, cluster))
    return Calibrated(new, cluster, (*fitted, *more), slack, step_times, unexplained)


def _scores(runs: Sequence[ObservedRun], profile: Profile, cluster: Cluster) -> list[Evaluation]:
    scores = [evaluate(run.plan, Problem(profile, cluster, run.options)) for run in runs]
    for run, score in zip(runs, scores, strict=True):
        if not 0 < score.step_time_s < math.inf:
            raise InputError(f"the plan of run {run.name} has no steady state at its depths: solve again with --force")
    return scores


def _times_of(run: ObservedRun, profile: Profile, cluster: Cluster) -> Times:
    """The times of all layers that one run shows.

    The predicted exposed time of an all-reduce depends on the layers' times, so both are computed by iteration.
    """
    exposed = [busy.sync_s for busy in run.stages]
    for _ in range(3):
        times = layer_times(run, profile, cluster, exposed)
        problem = Problem(with_times(profile, times), cluster, run.options)
        score = evaluate(run.plan, problem)
        exposed = [
            exposed_allreduce_per_minibatch_s(run.plan, problem, score, index) for index in range(len(run.plan.stages))
        ]
    return layer_times(run, profile, cluster, exposed)


def _with_measured_passes(run: ObservedRun, profile: Profile, cluster: Cluster) -> Profile:
    """The profile with the times of passes that a run measured, without the workers' other busy time."""
    others = [busy.own_s + busy.sync_s for busy in run.stages]
    return with_times(profile, layer_times(run, profile, cluster, others))


def layer_times(run: ObservedRun, profile: Profile, cluster: Cluster, exposed_s: Sequence[float]) -> Times:
    """The times of all layers that one run shows; `exposed_s` is the predicted exposed all-reduce time, by stage."""
    row_of = {layer.name: row for row, layer in enumerate(profile.layers)}
    old = _profiled(profile.layers)
    parameters = np.array([float(layer.parameter_bytes) for layer in profile.layers])
    times = old.copy()
    for stage, busy, exposed in zip(run.plan.stages, run.stages, exposed_s, strict=True):
        speed = cluster.speed_of(stage.workers)
        rows = sorted(row_of[name] for name in stage.layers)
        passes = busy.forward_s + busy.backward_s
        rest = max(busy.own_s + busy.sync_s - exposed, (LEAST - 1.0) * passes)
        grown = 1.0 + rest / passes
        forward, backward = busy.forward_s * grown * speed, busy.backward_s * grown * speed
        if stage.recompute:  # the backward pass includes a forward pass
            backward = max(backward - forward, LEAST * backward)
        share = run.options.update_share
        update = busy.update_s * speed / share if share else 0.0
        times[rows, 0] = _parts(forward, old[rows, 0])
        times[rows, 1] = _parts(backward, old[rows, 1])
        times[rows, 2] = _parts(update, old[rows, 2], parameters[rows])
        # The last stage reads the targets for the loss, which follows its last layer.
        reader = rows[-1 if stage is run.plan.stages[-1] and len(run.plan.stages) > 1 else 0]
        times[reader, 0] += busy.load_s * speed
    if run.plan.inference:  # a run of inference measures only forward passes
        times[:, 1:] = old[:, 1:]
    return times


def _profiled(layers: Sequence[Layer]) -> Times:
    return np.array([[getattr(layer, name) for name in TIMES] for layer in layers])


def _parts(total: float, *measures: Times) -> Times:
    """A total divided in proportion to the first measure that is not zero for all layers, else in equal parts."""
    for weights in (*measures, np.ones_like(measures[0])):
        if weights.sum() > 0:
            break
    return np.asarray(total * weights / weights.sum())


def _stretch(slack: float, inference: bool) -> Times:
    """The factors on the times of forward passes, backward passes and steps. Inference measures only forward passes."""
    return np.array([slack, *((1.0, 1.0) if inference else (slack, slack))])


def with_times(profile: Profile, times: Times) -> Profile:
    """The profile with these times. Spreads and times at other minibatch sizes change by the same factors."""
    old = _profiled(profile.layers)
    factors = np.divide(times, old, out=np.ones_like(times), where=old > 0)

    def changed(layers: Sequence[Layer], new: Times) -> tuple[Layer, ...]:
        return tuple(
            replace(
                layer,
                forward_s=forward_s,
                backward_s=backward_s,
                update_s=update_s,
                forward_spread_s=layer.forward_spread_s * forward_factor,
                backward_spread_s=layer.backward_spread_s * backward_factor,
                like="",
            )
            for layer, (forward_s, backward_s, update_s), (forward_factor, backward_factor, _) in zip(
                layers, new.tolist(), factors.tolist(), strict=True
            )
        )

    def resized(layers: Sequence[Layer]) -> Times:
        new = _profiled(layers) * factors
        new[:, 2] = times[:, 2]  # the step does not depend on the size of a minibatch
        return new

    whole: dict[str, Any] = dict.fromkeys(("whole_forward_s", "whole_backward_s", "whole_split_s"))
    sizes = tuple(replace(size, layers=changed(size.layers, resized(size.layers)), **whole) for size in profile.sizes)
    return replace(profile, layers=changed(profile.layers, times), sizes=sizes, **whole)

"""The main cause of the difference between a run's predicted and measured step time, as a sentence.

`step_time_model.attribute` finds the cause from the run's summary. If no stage is busy in most of the difference, the
stages wait for each other or for a link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeplan_launch.telemetry.step_time_model import (
    AS_PREDICTED,
    CORE,
    PASSES,
    StageBusyTimes,
    StepTimeModel,
    attribute,
    step_time_model_of,
)

ALIKE = 0.1
"""Relative spread of the factors by which the passes of all stages are off, up to which they have one cause."""
WORTH_SAYING = 0.1
"""Share of a worker's busy time above which a message mentions waiting for a core."""
WAITING, LINK = "waiting", "link"
_NAMES = {
    "forward_s": "forward",
    "backward_s": "backward",
    "update_s": "update",
    "sync_s": "all-reduce",
    "load_s": "reading of samples",
    "send_s": "handing over of tensors",
    "other_s": "executor itself",
    PASSES: PASSES,
    CORE: CORE,
}
_COMPUTING = ("forward_s", "backward_s", PASSES)
_CALIBRATE = "`pipeplan calibrate` predicts by what was measured"


@dataclass(frozen=True)
class Cause:
    """The cause that explains most of the difference."""

    kind: str
    """A term of a stage, such as `backward`; `core`, for waiting for a core; `waiting`, where no stage is busy; or
    `link`."""
    stage: int | None
    explains: float
    """Share of the difference that this cause alone explains."""
    text: str
    """One sentence, with figures."""

    def as_json(self) -> dict[str, Any]:
        """For summary.json."""
        return dict(vars(self))


def first_cause(summary: Mapping[str, Any]) -> Cause | None:
    """The main cause; None where the step time is as predicted, or a time was not predicted or not measured."""
    predicted, measured = summary["minibatch_s"]["predicted"], summary["minibatch_s"]["measured"]
    if not predicted or not measured or abs(measured / predicted - 1) <= AS_PREDICTED:
        return None
    model = step_time_model_of(summary)
    if model is None:
        return None
    cause = attribute(
        [stage.predicted for stage in model.stages],
        [stage.measured for stage in model.stages],
        model.step_time,
        predicted,
        measured,
    )
    if cause.resource is None:
        return _waiting(model, predicted, measured, cause.share)
    text = _term_text(model, cause.resource, cause.term, cause.share)
    return Cause(_NAMES[cause.term], cause.resource, cause.share, text)


def _term_text(model: StepTimeModel, index: int, name: str, share: float) -> str:
    stage = model.stages[index]
    measured, predicted = stage.shown[name], stage.predicted[name]
    subject = {
        "load_s": f"reading samples at stage {index}",
        "send_s": f"handing tensors over at stage {index}",
        "sync_s": f"waiting for all-reduces at stage {index}",
        "other_s": f"the executor's own work at stage {index}",
        PASSES: f"stage {index}'s passes, with what the executor does besides,",
        CORE: f"waiting for a core at stage {index}",
    }.get(name, f"stage {index}'s {_NAMES[name]}")
    if predicted > 0:
        verb = "take" if name == PASSES else "takes"
        times = f"{measured / predicted:.2f} times the predicted time"
        took = f"{verb} {times} ({_ms(measured)}{_core_note(stage, name)}, predicted {_ms(predicted)})"
    else:
        took = f"takes {_ms(measured)}{_core_note(stage, name)} a minibatch, which the prediction leaves out"
    why = _explanation(model, stage, name)
    if name in _COMPUTING and _all_alike(model):
        why = f"so do the passes of all stages, by about as much: {why}"
    return f"{subject} {took}: {why} (this alone explains {share:.0%} of the difference)"


def _core_note(stage: StageBusyTimes, name: str) -> str:
    """A note if the table shows another figure, which includes waiting for a core."""
    apart = stage.shown[CORE] > WORTH_SAYING * sum(stage.shown.values()) and name not in (CORE, "sync_s")
    return " without waiting for a core" if apart else ""


def _explanation(model: StepTimeModel, stage: StageBusyTimes, name: str) -> str:
    slower = stage.shown[name] > stage.predicted[name]
    if name in _COMPUTING:
        if slower and stage.cores:
            load = f"another load than {model.workers_beside(stage)} workers on {stage.cores:g} cores"
            return f"its layers were profiled under {load}; {_CALIBRATE}"
        if stage.modelled:
            return f"its profile is an estimate, not measured; {_CALIBRATE}"
        return f"its layers were {'calibrated' if name == PASSES else 'profiled'} under another load; {_CALIBRATE}"
    if name == "update_s":
        if slower and stage.versions > 1:
            copies = f"its weights are copied for the {stage.versions} versions that it may keep"
            return f"its optimiser was profiled alone, and {copies}; {_CALIBRATE}"
        return f"its optimiser was profiled under another load; {_CALIBRATE}"
    if name == "sync_s":
        return "their link, and the slowest of the replicas, decide" if slower else "they hide behind computing"
    if name == CORE:
        return "other programs use this machine"
    if name == "load_s":
        return "`Data(processes=…)` reads ahead"
    return "it dominates where stages compute little; larger minibatches or fewer stages help"


def _waiting(model: StepTimeModel, predicted_s: float, measured_s: float, share: float) -> Cause:
    stages = model.stages
    busy = [sum(stage.measured.values()) / len(stage.workers) for stage in stages]
    index = max(range(len(stages)), key=lambda one: busy[one])
    link = max(range(len(stages)), key=lambda one: stages[one].boundary_s)
    at_link = stages[link].boundary_s
    if at_link > 0 and at_link >= (1 - AS_PREDICTED) * predicted_s:
        text = (
            f"the link from stage {link} to stage {link + 1} is busy for {_ms(at_link)} a minibatch by the plan, and "
            f"bounds its step time; the run took {_ms(measured_s)}, and no stage was busy for more than "
            f"{_ms(max(busy))}"
        )
        return Cause(LINK, link, share, text)
    if measured_s < predicted_s:
        text = (
            f"by the plan something other than computing bounds the step time ({_ms(predicted_s)} a minibatch), which "
            f"did not: the busiest stage, {index}, is busy for {_ms(busy[index])} of the {_ms(measured_s)} measured"
        )
    elif model.batch is not None:
        text = (
            f"filling and draining take longer than the stages are busy ({_ms(busy[index])} a minibatch at stage "
            f"{index}, the busiest; measured {_ms(measured_s)}): latency, traffic and times that vary"
        )
    elif any(stage.cores for stage in stages):
        computed = _ms(model.step_time([stage.measured for stage in stages]))
        text = (
            f"the workers' computing does not keep the cores that they share busy: {computed} of {_ms(measured_s)} a "
            f"minibatch; in between the stages wait for each other, or others use the cores"
        )
    else:
        busy_of = f"{busy[index] / measured_s:.0%} of it ({_ms(busy[index])} of {_ms(measured_s)} a minibatch)"
        text = (
            f"no stage is busy all the time: the busiest, {index}, for {busy_of}; in between the stages wait for each "
            f"other: times that vary, latency, traffic"
        )
    return Cause(WAITING, None, share, text)


def _all_alike(model: StepTimeModel) -> bool:
    """Whether there are several stages and the passes of all are off by about the same factor."""
    ratios = []
    for stage in model.stages:
        before, after = (sum(one.get(name, 0.0) for name in _COMPUTING) for one in (stage.predicted, stage.shown))
        if before <= 0:
            return False
        ratios.append(after / before)
    return len(ratios) > 1 and max(ratios) <= min(ratios) * (1 + ALIKE) and not min(ratios) < 1 < max(ratios)


def _ms(seconds: float) -> str:
    scaled = seconds * 1e3
    return f"{scaled:.0f} ms" if scaled >= 100 else f"{scaled:.3g} ms"

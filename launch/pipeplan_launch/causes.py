"""The first cause of the difference between the predicted pace and the measured one: a function of a run's summary.

The proof is a what-if. A pace follows from what the workers are busy with: `whatif.Model.pace` has the formula. Take
the faster of the two, the prediction or the measurement, exchange one term of one stage for what the other says, and
see how much of the difference that alone explains. The term that explains the most is the first cause. What all terms
together do not explain is time in which no stage is busy: the stages wait for each other, or for a link.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan_launch.whatif import CORE, PASSES, Model, Stage, Terms, model_of

AS_PREDICTED = 0.03
"""Relative: a smaller difference has no cause to look for."""
ALIKE = 0.1
"""Stages whose passes are off by factors within this of each other are off for one reason."""
WORTH_SAYING = 0.1
"""Share of the time in which a worker is busy: waiting for a core for less is not mentioned."""
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
    """What explains most of the difference."""

    kind: str
    """A term of a stage, such as `backward`; `core`, where its worker waits for one; `waiting`, where nobody is busy;
    or `link`."""
    stage: int | None
    explains: float
    """Share of the difference that it explains alone."""
    text: str
    """One sentence, with figures."""

    def as_json(self) -> dict[str, Any]:
        """For summary.json."""
        return dict(vars(self))


def first_cause(summary: Mapping[str, Any]) -> Cause | None:
    """The cause that explains most; None where the pace is as predicted, or something was not predicted or measured."""
    predicted, measured = summary["minibatch_s"]["predicted"], summary["minibatch_s"]["measured"]
    if not predicted or not measured or abs(measured / predicted - 1) <= AS_PREDICTED:
        return None
    model = model_of(summary)
    return None if model is None else _search(model, predicted, measured)


def _search(model: Model, predicted_s: float, measured_s: float) -> Cause:
    """Exchange one term at a time, from the faster side."""
    stages, slower = model.stages, measured_s > predicted_s
    before = [stage.predicted if slower else stage.measured for stage in stages]
    after = [stage.measured if slower else stage.predicted for stage in stages]
    low, high = sorted((predicted_s, measured_s))

    def explained(terms: Sequence[Terms]) -> float:
        return (min(high, max(low, model.pace(terms))) - low) / (high - low)

    best = (-1.0, 0, "")
    for index, name in itertools.product(range(len(stages)), stages[0].predicted):
        terms = list(before)
        terms[index] = {**before[index], name: after[index][name]}
        best = max(best, (explained(terms), index, name), key=lambda found: found[0])
    share, index, name = best
    rest = 1.0 - explained(after)
    if rest > share or share <= 0.0:
        return _of_waiting(model, predicted_s, measured_s, rest)
    return Cause(_NAMES[name], index, share, _of_term(model, index, name, share))


def _of_term(model: Model, index: int, name: str, share: float) -> str:
    stage = model.stages[index]
    measured, predicted = stage.shown[name], stage.predicted[name]
    what = {
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
        took = f"{verb} {times} ({_ms(measured)}{_core(stage, name)}, predicted {_ms(predicted)})"
    else:
        took = f"takes {_ms(measured)}{_core(stage, name)} a minibatch, which the prediction leaves out"
    why = _why(model, stage, name)
    if name in _COMPUTING and _all_alike(model):
        why = f"so do the passes of all stages, by about as much: {why}"
    return f"{what} {took}: {why} (this alone explains {share:.0%} of the difference)"


def _core(stage: Stage, name: str) -> str:
    """That the figure is not what the table shows, where it is not."""
    apart = stage.shown[CORE] > WORTH_SAYING * sum(stage.shown.values()) and name not in (CORE, "sync_s")
    return " without waiting for a core" if apart else ""


def _why(model: Model, stage: Stage, name: str) -> str:
    slower = stage.shown[name] > stage.predicted[name]
    if name in _COMPUTING:
        if slower and stage.cores:
            load = f"another load than {model.sharing(stage)} workers on {stage.cores} cores"
            return f"its layers were profiled under {load}; {_CALIBRATE}"
        if stage.modelled:
            return f"its profile is an estimate, not measured; {_CALIBRATE}"
        return f"its layers were {'calibrated' if name == PASSES else 'profiled'} under another load; {_CALIBRATE}"
    if name == "update_s":
        if slower and stage.versions > 1:
            copies = f"copies of its weights, for the {stage.versions} versions that it may keep, are not predicted"
            return f"{copies}; {_CALIBRATE}"
        return f"its optimiser was profiled under another load; {_CALIBRATE}"
    if name == "sync_s":
        return "their link, and the slowest of the replicas, decide" if slower else "they hide behind computing"
    if name == CORE:
        return "other programs use this machine"
    if name == "load_s":
        return "`Data(processes=…)` reads ahead"
    return "what computes little is bound by it; larger minibatches or fewer stages help"


def _of_waiting(model: Model, predicted_s: float, measured_s: float, rest: float) -> Cause:
    stages = model.stages
    busy = [sum(stage.measured.values()) / len(stage.workers) for stage in stages]
    index = max(range(len(stages)), key=lambda one: busy[one])
    link = max(range(len(stages)), key=lambda one: stages[one].boundary_s)
    at_link = stages[link].boundary_s
    if at_link > 0 and at_link >= (1 - AS_PREDICTED) * predicted_s:
        text = (
            f"the link from stage {link} to stage {link + 1} is busy for {_ms(at_link)} a minibatch by the plan, and "
            f"bounds its pace; the run took {_ms(measured_s)}, and no stage was busy for more than {_ms(max(busy))}"
        )
        return Cause(LINK, link, rest, text)
    if measured_s < predicted_s:
        text = (
            f"by the plan something other than computing bounds the pace ({_ms(predicted_s)} a minibatch), which did "
            f"not: the busiest stage, {index}, is busy for {_ms(busy[index])} of the {_ms(measured_s)} measured"
        )
    elif model.batch is not None:
        text = (
            f"filling and draining take longer than the stages are busy ({_ms(busy[index])} a minibatch at stage "
            f"{index}, the busiest; measured {_ms(measured_s)}): latency, traffic and times that vary"
        )
    elif any(stage.cores for stage in stages):
        computed = _ms(model.pace([stage.measured for stage in stages]))
        text = (
            f"the workers' computing does not keep the cores that they share busy: {computed} of {_ms(measured_s)} a "
            f"minibatch; in between the stages wait for each other, or others use the cores"
        )
    else:
        share = f"{busy[index] / measured_s:.0%} of it ({_ms(busy[index])} of {_ms(measured_s)} a minibatch)"
        text = (
            f"no stage is busy all the time: the busiest, {index}, for {share}; in between the stages wait for each "
            f"other: times that vary, latency, traffic"
        )
    return Cause(WAITING, None, rest, text)


def _all_alike(model: Model) -> bool:
    """Whether the passes of all stages, of several, are off by about the same factor."""
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

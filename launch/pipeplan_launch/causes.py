"""The first cause of the difference between the predicted pace and the measured one: a function of a run's summary.

The proof is a what-if. A pace follows from what the workers are busy with: `_Model.pace` has the formula. Take the
faster of the two, the prediction or the measurement, exchange one term of one stage for what the other says, and see
how much of the difference that alone explains. The term that explains the most is the first cause. What all terms
together do not explain is time in which no stage is busy: the stages wait for each other, or for a link.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AS_PREDICTED = 0.03
"""Relative: a smaller difference has no cause to look for."""
ALIKE = 0.1
"""Stages whose passes are off by factors within this of each other are off for one reason."""
UNDISTURBED = 0.9
"""Share of the time of its passes that a worker computes, where nobody else takes its core."""
PASSES = "passes"
_NAMES = {
    "forward_s": "forward",
    "backward_s": "backward",
    "update_s": "update",
    "sync_s": "all-reduce",
    "load_s": "reading of samples",
    "send_s": "handing over of tensors",
    "other_s": "executor itself",
    PASSES: PASSES,
}
_AT_UPDATES = ("update_s", "sync_s")
_TERMS = ("forward_s", "backward_s", *_AT_UPDATES, "load_s", "send_s", "other_s")
_OF_PASSES = ("forward_s", "backward_s", "load_s", "send_s", "other_s")
"""In one, where the prediction is from a calibrated profile: its passes hold what the executor does besides."""
FLUSHING = ("gpipe", "1f1b-flush")
WAITING, LINK = "waiting", "link"

_CALIBRATE = "`pipeplan calibrate` predicts by what was measured"
_COMPUTING = ("forward_s", "backward_s", PASSES)
Terms = Mapping[str, float]


@dataclass(frozen=True)
class Cause:
    """What explains most of the difference."""

    kind: str
    """A term of a stage, such as `backward`; `waiting`, where nobody is busy; or `link`."""
    stage: int | None
    explains: float
    """Share of the difference that it explains alone."""
    text: str
    """One sentence, with figures."""

    def as_json(self) -> dict[str, Any]:
        """For summary.json."""
        return dict(vars(self))


@dataclass(frozen=True)
class _Stage:
    """What one replica is busy with for a minibatch that it computes, s."""

    workers: Sequence[int]
    predicted: Terms
    measured: Terms
    """Where workers share cores, what they computed: waiting for a core is left out."""
    wall: Terms
    """As it was measured, by the clock."""
    boundary_s: float
    cores: int
    computed: float | None
    """Share of the time of its passes that a worker computed; None where that is not known."""
    versions: int
    modelled: bool
    """Whether the prediction is from an estimate."""

    @property
    def terms(self) -> tuple[str, ...]:
        """What one after the other is exchanged."""
        return tuple(self.predicted)


@dataclass(frozen=True)
class _Model:
    """The pace that follows from what stages are busy with."""

    stages: Sequence[_Stage]
    starts: Sequence[int]
    """The first worker of every server, and their number at the end."""
    batch: int | None
    """Minibatches of an update, where the pipeline drains before it."""

    def pace(self, terms: Sequence[Terms]) -> float:
        """Seconds a minibatch: the busiest stage, per replica; or the cores that workers share, busy with the sum of
        what these compute. With a flush: filling and draining, the slowest stage's other minibatches, and the update.
        """
        busy = [sum(one.values()) for one in terms]
        shared = self._cores(busy)
        if self.batch is None:
            each = (total / len(stage.workers) for stage, total in zip(self.stages, busy, strict=True))
            return max(*each, shared)
        late = [sum(one[name] for name in _AT_UPDATES) for one in terms]
        passes = [total - update for total, update in zip(busy, late, strict=True)]
        rounds = [math.ceil(self.batch / len(stage.workers)) for stage in self.stages]
        steady = max((count - 1) * one for count, one in zip(rounds, passes, strict=True))
        update = max(count * one for count, one in zip(rounds, late, strict=True))
        return max((sum(passes) + steady + update) / self.batch, shared)

    def _cores(self, busy: Sequence[float]) -> float:
        most = 0.0
        for first, stop in itertools.pairwise(self.starts):
            inside = [sum(first <= worker < stop for worker in stage.workers) for stage in self.stages]
            cores = max((stage.cores for stage, count in zip(self.stages, inside, strict=True) if count), default=0)
            if cores:
                parts = zip(inside, busy, self.stages, strict=True)
                most = max(most, sum(count * one / len(stage.workers) for count, one, stage in parts) / cores)
        return most


def first_cause(summary: Mapping[str, Any]) -> Cause | None:
    """The cause that explains most; None where the pace is as predicted, or something was not predicted or measured."""
    predicted, measured = summary["minibatch_s"]["predicted"], summary["minibatch_s"]["measured"]
    if not predicted or not measured or abs(measured / predicted - 1) <= AS_PREDICTED:
        return None
    # Only there do times by the clock and by the processor say whether a worker had its core.
    computes = summary["device"] == "cpu" and not summary["emulated"]
    stages = [_stage(entry, summary["profile"], computes) for entry in summary["stages"]]
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages):
        return None
    starts = [0, *itertools.accumulate(summary["server_sizes"])]
    batch = summary["accumulate"] if summary["schedule"] in FLUSHING else None
    model = _Model(known, starts, batch)
    return _search(model, predicted, measured)


def _stage(entry: Mapping[str, Any], profile: str, computes: bool) -> _Stage | None:
    """None where a time was not predicted or not measured."""
    pairs = {name: entry[name] for name in _TERMS if name in entry}
    own = {name: entry["measured"][name] for name in _TERMS if name not in entry}
    wall = {name: pair["measured"] for name, pair in pairs.items()} | own
    predicted = {name: pair["predicted"] for name, pair in pairs.items()} | dict.fromkeys(own, 0.0)
    # A plan of inference says nothing of updates, and a single replica's says nothing of all-reduces.
    predicted |= {name: predicted[name] or 0.0 for name in ("backward_s", *_AT_UPDATES)}
    if None in wall.values() or None in predicted.values():
        return None
    if profile == "calibrated":
        wall, predicted = _in_one(wall), _in_one(predicted)
    busy, computed = sum(wall.values()), entry["measured"]["cpu_s"]
    waits = wall["sync_s"]
    cores = int(entry["cores"] or 0)
    share = computed / busy if computes and cores and computed and busy else 1.0
    return _Stage(
        workers=entry["workers"],
        predicted=predicted,
        measured={name: value * share for name, value in wall.items()},
        wall=wall,
        boundary_s=entry["boundary_s"] or 0.0,
        cores=cores,
        computed=computed / (busy - waits) if computes and computed and busy > waits else None,
        versions=entry["versions"],
        modelled=profile == "modelled",
    )


def _in_one(terms: Terms) -> dict[str, float]:
    return {PASSES: sum(terms[name] for name in _OF_PASSES)} | {name: terms[name] for name in _AT_UPDATES}


def _search(model: _Model, predicted_s: float, measured_s: float) -> Cause:
    """Exchange one term at a time, from the faster side."""
    stages, slower = model.stages, measured_s > predicted_s
    before = [stage.predicted if slower else stage.measured for stage in stages]
    after = [stage.measured if slower else stage.predicted for stage in stages]
    low, high = sorted((predicted_s, measured_s))

    def explained(terms: Sequence[Terms]) -> float:
        return (min(high, max(low, model.pace(terms))) - low) / (high - low)

    best = (-1.0, 0, "")
    for index, name in itertools.product(range(len(stages)), stages[0].terms):
        terms = list(before)
        terms[index] = {**before[index], name: after[index][name]}
        best = max(best, (explained(terms), index, name), key=lambda found: found[0])
    share, index, name = best
    rest = 1.0 - explained(after)
    if rest > share or share <= 0.0:
        return _of_waiting(model, predicted_s, measured_s, rest)
    return Cause(_NAMES[name], index, share, _of_term(model, index, name, share))


def _of_term(model: _Model, index: int, name: str, share: float) -> str:
    stage = model.stages[index]
    measured, predicted = stage.wall[name], stage.predicted[name]
    what = {
        "load_s": f"reading samples at stage {index}",
        "send_s": f"handing tensors over at stage {index}",
        "sync_s": f"waiting for all-reduces at stage {index}",
        "other_s": f"the executor's own work at stage {index}",
        PASSES: f"stage {index}'s passes, with what the executor does besides,",
    }.get(name, f"stage {index}'s {_NAMES[name]}")
    if predicted > 0:
        verb = "take" if name == PASSES else "takes"
        times = f"{measured / predicted:.2f} times the predicted time"
        took = f"{verb} {times} ({_ms(measured)}, predicted {_ms(predicted)})"
    else:
        took = f"takes {_ms(measured)} a minibatch, which the prediction leaves out"
    why = _why(model, stage, name)
    if name in _COMPUTING and _all_alike(model):
        why = f"so do the passes of all stages, by about as much: {why}"
    return f"{what} {took}: {why} (this alone explains {share:.0%} of the difference)"


def _why(model: _Model, stage: _Stage, name: str) -> str:
    slower = stage.wall[name] > stage.predicted[name]
    if name in _COMPUTING:
        if slower and not stage.cores and stage.computed is not None and stage.computed < UNDISTURBED:
            return f"its worker had a core for {stage.computed:.0%} of that time only: others use this machine"
        if slower and stage.cores:
            load = f"another load than {_sharing(model, stage)} workers on {stage.cores} cores"
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
    if name == "load_s":
        return "`Data(processes=…)` reads ahead"
    return "what computes little is bound by it; larger minibatches or fewer stages help"


def _of_waiting(model: _Model, predicted_s: float, measured_s: float, rest: float) -> Cause:
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
        return Cause(WAITING, None, rest, text)
    if model.batch is not None:
        text = (
            f"filling and draining take longer than the stages are busy ({_ms(busy[index])} a minibatch at stage "
            f"{index}, the busiest; measured {_ms(measured_s)}): latency, traffic and times that vary"
        )
        return Cause(WAITING, None, rest, text)
    share = busy[index] / measured_s
    text = (
        f"no stage is busy all the time: the busiest, {index}, for {share:.0%} of it ({_ms(busy[index])} of "
        f"{_ms(measured_s)} a minibatch); in between the stages wait for each other: times that vary, latency, traffic"
    )
    if any(stage.cores for stage in stages):
        computed = _ms(model.pace([stage.measured for stage in stages]))
        text = (
            f"the workers' computing does not keep the cores that they share busy: {computed} "
            f"of {_ms(measured_s)} a minibatch; in between the stages wait for each other, or others use the cores"
        )
    return Cause(WAITING, None, rest, text)


def _all_alike(model: _Model) -> bool:
    """Whether the passes of all stages, of several, are off by about the same factor."""
    ratios = []
    for stage in model.stages:
        before, after = (sum(one.get(name, 0.0) for name in _COMPUTING) for one in (stage.predicted, stage.wall))
        if before <= 0:
            return False
        ratios.append(after / before)
    return len(ratios) > 1 and max(ratios) <= min(ratios) * (1 + ALIKE) and not min(ratios) < 1 < max(ratios)


def _sharing(model: _Model, stage: _Stage) -> int:
    """How many workers with something to do share the cores of a stage's server."""
    server = next(pair for pair in itertools.pairwise(model.starts) if pair[0] <= stage.workers[0] < pair[1])
    return sum(server[0] <= worker < server[1] for one in model.stages for worker in one.workers)


def _ms(seconds: float) -> str:
    scaled = seconds * 1e3
    return f"{scaled:.0f} ms" if scaled >= 100 else f"{scaled:.3g} ms"

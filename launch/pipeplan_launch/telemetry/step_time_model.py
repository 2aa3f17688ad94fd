"""The number that explains most of the difference between a predicted and a measured step time.

The method is a what-if. A step time follows from the times for which resources, such as the replicas of a stage or a
link, are busy. Take the faster of prediction and measurement, exchange one time for its value on the other side, and
compute the step time again. The exchange that explains the largest share of the difference names the cause. The share
that remains when all times are exchanged is waiting: in that time no resource is busy.

`attribute` is the method. `StepTimeModel` computes the step time of a run; replays (tests/evaluation) bring a model of
its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AS_PREDICTED = 0.03
"""Relative difference of two step times up to which no cause is sought."""

AT_UPDATES = ("update_s", "sync_s")
TERMS = ("forward_s", "backward_s", *AT_UPDATES, "load_s", "send_s", "other_s")
OWN_WORK = ("load_s", "send_s", "other_s")
PASSES, CORE = "passes", "core"
_IN_PASSES = ("forward_s", "backward_s", "load_s", "send_s", "other_s")
"""The terms that a calibrated profile predicts as one, because its passes include the executor's own time."""
MOST_WAITING = 0.95
"""Largest share of a worker's busy time that counts as waiting for a core."""
FLUSHING = ("gpipe", "1f1b-flush", "zb-h1")

Terms = Mapping[str, float]
"""Seconds per minibatch for which a resource is busy, by name."""


@dataclass(frozen=True)
class Attribution:
    """The time whose exchange explains most of the difference."""

    resource: int | None
    """Index of the resource; None where waiting explains more than any exchange."""
    term: str
    share: float
    """Explained share of the difference, from 0 to 1."""


def attribute(
    predicted: Sequence[Terms],
    measured: Sequence[Terms],
    step_time: Callable[[Sequence[Terms]], float],
    predicted_s: float,
    measured_s: float,
) -> Attribution:
    """Attribute the difference between two step times to one time of one resource, or to waiting.

    `predicted` and `measured` have the terms of all resources, in the same order; `step_time` computes seconds per
    minibatch from such terms.
    """
    before, after = (predicted, measured) if measured_s > predicted_s else (measured, predicted)
    low, high = sorted((predicted_s, measured_s))

    def explained(terms: Sequence[Terms]) -> float:
        return (min(high, max(low, step_time(terms))) - low) / (high - low)

    best = Attribution(None, "", 0.0)
    for index, terms in enumerate(before):
        for name in terms:
            exchanged = list(before)
            exchanged[index] = {**terms, name: after[index][name]}
            share = explained(exchanged)
            if share > best.share:
                best = Attribution(index, name, share)
    waiting = 1.0 - explained(after)
    return Attribution(None, "", waiting) if waiting > best.share or best.resource is None else best


def busiest_s(terms: Sequence[Terms], replicas: Sequence[int]) -> float:
    """Seconds per minibatch of the busiest resource, whose replicas take minibatches in turn."""
    return max(sum(one.values()) / count for one, count in zip(terms, replicas, strict=True))


@dataclass(frozen=True)
class StageBusyTimes:
    """The busy times of one replica of a stage, in seconds per minibatch that it computes.

    The terms are `TERMS` and `CORE`, which is waiting for a core that other programs use. With a calibrated profile,
    `PASSES` stands for all terms that its passes include.
    """

    workers: Sequence[int]
    predicted: Terms
    measured: Terms
    """Measured times. Where workers share cores, without all waiting for a core."""
    shown: Terms
    """Measured times for messages. Where workers share cores, by the clock."""
    boundary_s: float
    cores: float
    versions: int
    modelled: bool
    """Whether the prediction is from an estimate."""


@dataclass(frozen=True)
class StepTimeModel:
    """The step time of a run, computed from the busy times of its stages."""

    stages: Sequence[StageBusyTimes]
    starts: Sequence[int]
    """The first worker of every server, and the number of workers at the end."""
    batch: int | None
    """Minibatches per update with a schedule that drains the pipeline before it; else None."""

    def step_time(self, terms: Sequence[Terms]) -> float:
        """Seconds per minibatch, from the terms of all stages.

        The step time is that of the busiest stage, or of the cores that workers share. With a flush it is the time of
        filling and draining, of the slowest stage's remaining minibatches and of the update, per minibatch.
        """
        busy = [sum(one.values()) for one in terms]
        shared = self._cores(busy)
        if self.batch is None:
            return max(busiest_s(terms, [len(stage.workers) for stage in self.stages]), shared)
        late = [sum(one[name] for name in AT_UPDATES) for one in terms]
        passes = [total - update for total, update in zip(busy, late, strict=True)]
        rounds = [math.ceil(self.batch / len(stage.workers)) for stage in self.stages]
        steady = max((count - 1) * one for count, one in zip(rounds, passes, strict=True))
        update = max(count * one for count, one in zip(rounds, late, strict=True))
        return max((sum(passes) + steady + update) / self.batch, shared)

    def workers_beside(self, stage: StageBusyTimes) -> int:
        """Number of busy workers on the server of a stage's first worker, itself included."""
        first, stop = next(pair for pair in itertools.pairwise(self.starts) if pair[0] <= stage.workers[0] < pair[1])
        return sum(first <= worker < stop for one in self.stages for worker in one.workers)

    def _cores(self, busy: Sequence[float]) -> float:
        """Seconds per minibatch for which the shared cores of the most loaded server are busy."""
        most = 0.0
        for first, stop in itertools.pairwise(self.starts):
            inside = [sum(first <= worker < stop for worker in stage.workers) for stage in self.stages]
            cores = max((stage.cores for stage, count in zip(self.stages, inside, strict=True) if count), default=0)
            if cores:
                parts = zip(inside, busy, self.stages, strict=True)
                most = max(most, sum(count * one / len(stage.workers) for count, one, stage in parts) / cores)
        return most


def step_time_model_of(summary: Mapping[str, Any]) -> StepTimeModel | None:
    """The model of a run's summary; None where a time was not predicted or not measured."""
    # On GPUs and in emulations, clock minus processor time does not show whether a worker waited for a core.
    computes = summary["device"] == "cpu" and not summary["emulated"]
    stages = [_stage(entry, summary["profile"], computes) for entry in summary["stages"]]
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages):
        return None
    batch = summary["accumulate"] if summary["schedule"] in FLUSHING else None
    return StepTimeModel(known, [0, *itertools.accumulate(summary["server_sizes"])], batch)


def _stage(entry: Mapping[str, Any], profile: str, computes: bool) -> StageBusyTimes | None:
    pairs = {name: entry[name] for name in TERMS if name in entry}
    own = {name: entry["measured"][name] for name in TERMS if name not in entry}
    wall = {name: pair["measured"] for name, pair in pairs.items()} | own
    predicted = {name: pair["predicted"] for name, pair in pairs.items()} | dict.fromkeys(own, 0.0)
    # A plan of inference has no updates, and one with a single replica has no all-reduces.
    predicted |= {name: predicted[name] or 0.0 for name in ("backward_s", *AT_UPDATES)}
    if None in wall.values() or None in predicted.values():
        return None
    if entry.get("executor_s") is not None and profile != "calibrated":
        wall = _with_own_work(wall)
        predicted = _with_own_work(predicted | {"other_s": entry["executor_s"]})
    if profile == "calibrated":
        wall, predicted = _with_passes(wall), _with_passes(predicted)
    busy, cores = sum(wall.values()), float(entry["cores"] or 0)
    computed, waited = entry["measured"]["cpu_s"], _waited_for_others_s(entry["measured"], cores) if computes else 0.0
    shown = wall | {CORE: waited}
    if waited and not cores:
        shown = _without_core_wait(wall, waited)
    share = computed / busy if computes and cores and computed and busy else 1.0
    return StageBusyTimes(
        workers=entry["workers"],
        predicted=predicted | {CORE: 0.0},
        measured={name: value * (1.0 if name == CORE else share) for name, value in shown.items()},
        shown=shown,
        boundary_s=entry["boundary_s"] or 0.0,
        cores=cores,
        versions=entry["versions"],
        modelled=profile == "modelled",
    )


def _waited_for_others_s(measured: Mapping[str, float | None], cores: float) -> float:
    """How long a worker waited for a core that other programs used; workers wait for each other too."""
    earlier = 0.0 if cores else measured["core_wait_s"]  # of runs whose summary does not tell them apart
    return measured.get("others_wait_s", earlier) or 0.0


def _with_own_work(terms: Terms) -> dict[str, float]:
    """The terms with all of the executor's own work in one, as it is predicted."""
    own = sum(terms[name] for name in OWN_WORK)
    return {name: value for name, value in terms.items() if name not in OWN_WORK} | {"other_s": own}


def _with_passes(terms: Terms) -> dict[str, float]:
    """The terms with `PASSES` in place of all that a calibrated profile predicts as one."""
    return {PASSES: sum(terms[name] for name in _IN_PASSES)} | {name: terms[name] for name in AT_UPDATES}


def _without_core_wait(wall: Terms, waited_s: float) -> dict[str, float]:
    """Move waiting for a core to a term of its own, in proportion from all terms except all-reduces."""
    active = sum(value for name, value in wall.items() if name != "sync_s")
    core = min(waited_s, MOST_WAITING * active)
    remaining = {
        name: value * (1.0 - core / active) if active and name != "sync_s" else value for name, value in wall.items()
    }
    return remaining | {CORE: core}

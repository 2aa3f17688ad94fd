"""The pace that follows from what the workers of a run were busy with, whichever of its numbers are exchanged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AT_UPDATES = ("update_s", "sync_s")
TERMS = ("forward_s", "backward_s", *AT_UPDATES, "load_s", "send_s", "other_s")
PASSES, CORE = "passes", "core"
_OF_PASSES = ("forward_s", "backward_s", "load_s", "send_s", "other_s")
"""In one, where the prediction is from a calibrated profile: its passes hold what the executor does besides."""
MOST_WAITING = 0.95
"""Share of the time in which a worker is busy that can have been waiting for a core."""
FLUSHING = ("gpipe", "1f1b-flush")

Terms = Mapping[str, float]


@dataclass(frozen=True)
class Stage:
    """What one replica is busy with for a minibatch that it computes, s, by `TERMS`, and `CORE`, waiting for a core
    that others use; with `PASSES` in place of what they hold where the profile was calibrated."""

    workers: Sequence[int]
    predicted: Terms
    measured: Terms
    """Where workers share cores, what they computed: all waiting for a core is left out."""
    shown: Terms
    """The same as people see it: where workers share cores, by the clock."""
    boundary_s: float
    cores: int
    versions: int
    modelled: bool
    """Whether the prediction is from an estimate."""


@dataclass(frozen=True)
class Model:
    """The pace that follows from what stages are busy with."""

    stages: Sequence[Stage]
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
        late = [sum(one[name] for name in AT_UPDATES) for one in terms]
        passes = [total - update for total, update in zip(busy, late, strict=True)]
        rounds = [math.ceil(self.batch / len(stage.workers)) for stage in self.stages]
        steady = max((count - 1) * one for count, one in zip(rounds, passes, strict=True))
        update = max(count * one for count, one in zip(rounds, late, strict=True))
        return max((sum(passes) + steady + update) / self.batch, shared)

    def sharing(self, stage: Stage) -> int:
        """How many workers with something to do are on the server of a stage's first."""
        first, stop = next(pair for pair in itertools.pairwise(self.starts) if pair[0] <= stage.workers[0] < pair[1])
        return sum(first <= worker < stop for one in self.stages for worker in one.workers)

    def _cores(self, busy: Sequence[float]) -> float:
        most = 0.0
        for first, stop in itertools.pairwise(self.starts):
            inside = [sum(first <= worker < stop for worker in stage.workers) for stage in self.stages]
            cores = max((stage.cores for stage, count in zip(self.stages, inside, strict=True) if count), default=0)
            if cores:
                parts = zip(inside, busy, self.stages, strict=True)
                most = max(most, sum(count * one / len(stage.workers) for count, one, stage in parts) / cores)
        return most


def model_of(summary: Mapping[str, Any]) -> Model | None:
    """The model of a run's summary; None where a time was not predicted or not measured."""
    # Only there do times by the clock and by the processor say whether a worker had its core.
    computes = summary["device"] == "cpu" and not summary["emulated"]
    stages = [_stage(entry, summary["profile"], computes) for entry in summary["stages"]]
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages):
        return None
    batch = summary["accumulate"] if summary["schedule"] in FLUSHING else None
    return Model(known, [0, *itertools.accumulate(summary["server_sizes"])], batch)


def _stage(entry: Mapping[str, Any], profile: str, computes: bool) -> Stage | None:
    pairs = {name: entry[name] for name in TERMS if name in entry}
    own = {name: entry["measured"][name] for name in TERMS if name not in entry}
    wall = {name: pair["measured"] for name, pair in pairs.items()} | own
    predicted = {name: pair["predicted"] for name, pair in pairs.items()} | dict.fromkeys(own, 0.0)
    # A plan of inference says nothing of updates, and a single replica's says nothing of all-reduces.
    predicted |= {name: predicted[name] or 0.0 for name in ("backward_s", *AT_UPDATES)}
    if None in wall.values() or None in predicted.values():
        return None
    if profile == "calibrated":
        wall, predicted = _in_one(wall), _in_one(predicted)
    busy, cores = sum(wall.values()), int(entry["cores"] or 0)
    computed, waited = entry["measured"]["cpu_s"], entry["measured"]["core_wait_s"]
    shown = wall | {CORE: 0.0}
    if computes and not cores and waited:
        shown = _without(wall, waited)
    share = computed / busy if computes and cores and computed and busy else 1.0
    return Stage(
        workers=entry["workers"],
        predicted=predicted | {CORE: 0.0},
        measured={name: value * share for name, value in shown.items()},
        shown=shown,
        boundary_s=entry["boundary_s"] or 0.0,
        cores=cores,
        versions=entry["versions"],
        modelled=profile == "modelled",
    )


def _in_one(terms: Terms) -> dict[str, float]:
    return {PASSES: sum(terms[name] for name in _OF_PASSES)} | {name: terms[name] for name in AT_UPDATES}


def _without(wall: Terms, waited_s: float) -> dict[str, float]:
    """The times with what the worker waited for a core apart, as if it had come alike over all but all-reduces."""
    active = sum(value for name, value in wall.items() if name != "sync_s")
    core = min(waited_s, MOST_WAITING * active)
    left = {
        name: value * (1.0 - core / active) if active and name != "sync_s" else value for name, value in wall.items()
    }
    return left | {CORE: core}

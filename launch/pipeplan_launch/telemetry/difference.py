"""Explains the difference between a run's measured and predicted step time: its parts by source, and its main cause.

`StepTimeModel` computes a step time from the busy times of the stages. Replacing some predicted busy times by measured
times shows their effect on the step time.

- The parts: each source (this machine, the executor, other programs, the network) gets its Shapley value: the mean
  change of the step time when its times are replaced, over all orders of the sources. So the parts add up.
- The cause: the single time of one stage whose replacement alone explains the largest share. Times are replaced in the
  prediction or in the measurement, whichever is faster.

The difference that remains when all times are replaced is waiting: time in which no stage is busy. Torch-free.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan_launch.plan.schedule import SCHEDULES
from pipeplan_launch.telemetry.run_folder import CauseFields

AS_PREDICTED = 0.03
"""Largest relative difference of predicted and measured step time for which no cause is sought."""
WORTH_A_LINE = 0.05
"""Share of the difference below which a part gets no line."""
WORTH_SAYING = 0.1
"""Share of a worker's busy time above which a message mentions waiting for a core."""
MOST_WAITING = 0.95
"""Largest share of a worker's busy time that counts as waiting for a core."""

AT_UPDATES = ("update_s", "sync_s")
OWN_WORK = ("load_s", "send_s", "other_s")
TERMS = ("forward_s", "backward_s", *AT_UPDATES, *OWN_WORK)
PASSES, CORE = "passes", "core"
"""Two terms: times that are known only as one sum, in the prediction of a calibrated profile or in what a GPU took, and
waiting for a core that other programs use."""
_IN_PASSES = ("forward_s", "backward_s", *OWN_WORK)
MACHINE, EXECUTOR, PROGRAMS, NETWORK, WAITING, LINK = "machine", "executor", "programs", "network", "waiting", "link"
_LINES = {
    MACHINE: "this machine: passes and updates, beside those of the profile",
    EXECUTOR: "the executor: reading samples, sending, and all else that it does",
    PROGRAMS: "other programs: workers waited for a core that these used",
    NETWORK: "the network: all-reduces, and messages that were waited for",
    WAITING: "waiting: no worker was busy, as times vary and minibatches are handed on late",
}
_TERMS = {
    "forward_s": (MACHINE, "forward", "stage {}'s forward"),
    "backward_s": (MACHINE, "backward", "stage {}'s backward"),
    "update_s": (MACHINE, "update", "stage {}'s update"),
    "sync_s": (NETWORK, "all-reduce", "waiting for all-reduces at stage {}"),
    "load_s": (EXECUTOR, "reading of samples", "reading samples at stage {}"),
    "send_s": (EXECUTOR, "handing over of tensors", "handing tensors over at stage {}"),
    "other_s": (EXECUTOR, "executor itself", "the executor's own work at stage {}"),
    PASSES: (MACHINE, PASSES, "stage {}'s passes, with what the executor does besides,"),
    CORE: (PROGRAMS, CORE, "waiting for a core at stage {}"),
}
"""(source, kind of the cause, subject of its sentence) by term."""

Terms = Mapping[str, float]  # seconds per minibatch for which a worker is busy


@dataclass(frozen=True)
class StageBusyTimes:
    """The busy times of one replica of a stage, by the keys of `_TERMS`, in seconds per minibatch that it computes."""

    workers: Sequence[int]
    predicted: Terms
    measured: Terms
    """Measured times. If workers share cores, they exclude waiting for a core."""
    shown: Terms
    """Measured times to show in messages. If workers share cores, they include waiting for a core."""
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
    """Minibatches per update if the schedule drains the pipeline before every update; else None."""

    def step_time(self, terms: Sequence[Terms]) -> float:
        """Seconds per minibatch, from the terms of all stages.

        The step time is the time of the busiest stage, or of the shared cores if that is longer. With a flush it is the
        sum of filling and draining, the slowest stage's remaining minibatches and the update, per minibatch.
        """
        busy = [sum(one.values()) for one in terms]
        shared, replicas = self._cores(busy), [len(stage.workers) for stage in self.stages]
        if self.batch is None:
            return max(shared, *(one / count for one, count in zip(busy, replicas, strict=True)))
        late = [sum(one[name] for name in AT_UPDATES) for one in terms]
        passes = [total - update for total, update in zip(busy, late, strict=True)]
        rounds = [math.ceil(self.batch / count) for count in replicas]
        steady = max((count - 1) * one for count, one in zip(rounds, passes, strict=True))
        update = max(count * one for count, one in zip(rounds, late, strict=True))
        return max((sum(passes) + steady + update) / self.batch, shared)

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


def _model_of(summary: Mapping[str, Any]) -> StepTimeModel | None:
    """The model of a run's summary; None if the step time is as predicted, or if a time is not known."""
    predicted, measured = summary["minibatch_s"]["predicted"], summary["minibatch_s"]["measured"]
    if not predicted or not measured or abs(measured / predicted - 1) <= AS_PREDICTED:
        return None
    # On GPUs and in emulations, clock minus processor time does not show whether a worker waited for a core.
    computes = summary["device"] == "cpu" and not summary["emulated"]
    found = [_stage(entry, summary, computes) for entry in summary["stages"]]
    if len(known := [stage for stage in found if stage is not None]) < len(found):
        return None
    batch = summary["accumulate"] if SCHEDULES[summary["schedule"]].flushes else None
    return StepTimeModel(known, [0, *itertools.accumulate(summary["server_sizes"])], batch)


def _stage(entry: Mapping[str, Any], summary: Mapping[str, Any], computes: bool) -> StageBusyTimes | None:
    """The busy times of a stage's entry in a summary; None if a time was not predicted or not measured.

    Kernels of a GPU run after the host has started them, so only the sum of its passes and of the host's work is known.
    """
    profile = summary["profile"]
    pairs, own = {name: entry[name] for name in TERMS if name in entry}, entry["measured"]
    wall = {name: pairs[name]["measured"] if name in pairs else own[name] for name in TERMS}
    predicted = {name: pairs[name]["predicted"] if name in pairs else 0.0 for name in TERMS}
    # A plan of inference has no updates, and one with a single replica has no all-reduces.
    predicted |= {name: predicted[name] or 0.0 for name in ("backward_s", *AT_UPDATES)}
    if None in wall.values() or None in predicted.values():
        return None
    if profile != "calibrated" and entry.get("executor_s") is not None:
        # All of the executor's own work is predicted as one sum.
        wall = _joined(wall, "other_s", OWN_WORK)
        predicted = _joined(predicted | {"other_s": entry["executor_s"]}, "other_s", OWN_WORK)
    if profile == "calibrated" or summary["device"] != "cpu":
        wall, predicted = _joined(wall, PASSES, _IN_PASSES), _joined(predicted, PASSES, _IN_PASSES)
    busy, cores = sum(wall.values()), float(entry["cores"] or 0)
    waited = own["others_wait_s"] or 0.0 if computes else 0.0
    shown = _without_core_wait(wall, waited) if waited and not cores else wall | {CORE: waited}
    share = own["cpu_s"] / busy if computes and cores and own["cpu_s"] and busy else 1.0
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


def _joined(terms: Terms, name: str, parts: Sequence[str]) -> dict[str, float]:
    """The terms, with one sum in place of several terms that are predicted as one."""
    return {
        **{other: value for other, value in terms.items() if other not in parts},
        name: sum(terms.get(part, 0.0) for part in parts),
    }


def _without_core_wait(wall: Terms, waited_s: float) -> dict[str, float]:
    """Move waiting for a core to a term of its own. All terms except all-reduces become shorter in proportion."""
    active = sum(value for name, value in wall.items() if name != "sync_s")
    core = min(waited_s, MOST_WAITING * active)
    kept = 1.0 - core / active if active else 1.0
    return {name: value if name == "sync_s" else value * kept for name, value in wall.items()} | {CORE: core}


def difference(summary: Mapping[str, Any]) -> dict[str, float]:
    """The difference by source, measured minus predicted, in seconds per minibatch; empty if there is nothing to
    explain.
    """
    model = _model_of(summary)
    if model is None:
        return {}
    predicted, measured = summary["minibatch_s"]["predicted"], summary["minibatch_s"]["measured"]
    step_time = _within(model, predicted, measured)
    sources = sorted({_TERMS[name][0] for name in model.stages[0].predicted})

    def exchanged(chosen: frozenset[str]) -> float:
        """The step time with the measured times of some sources, and the predicted times of the others."""
        pairs = [(one.predicted, one.measured) for one in model.stages]
        return step_time([{t: (new if _TERMS[t][0] in chosen else old)[t] for t in old} for old, new in pairs])

    counts = range(len(sources) + 1)
    known = {frozenset(one): exchanged(frozenset(one)) for n in counts for one in itertools.combinations(sources, n)}
    changes: dict[str, list[float]] = {source: [] for source in sources}
    for order in itertools.permutations(sources):
        for done, source in enumerate(order):
            changes[source].append(known[frozenset(order[: done + 1])] - known[frozenset(order[:done])])
    parts = {source: statistics.fmean(values) for source, values in changes.items()}
    rest = NETWORK if _bound_link(model, predicted) is not None else WAITING
    parts[rest] = parts.get(rest, 0.0) + measured - predicted - sum(parts.values())
    return parts


def _within(model: StepTimeModel, one_s: float, other_s: float) -> Callable[[Sequence[Terms]], float]:
    """The model's step time, limited to the range between the two compared step times."""
    low, high = sorted((one_s, other_s))
    return lambda terms: min(high, max(low, model.step_time(terms)))


def _bound_link(model: StepTimeModel, predicted_s: float) -> int | None:
    """The stage behind which the plan expects a link to be busy all the time; None if there is none."""
    busiest = max(range(len(model.stages)), key=lambda one: model.stages[one].boundary_s)
    return busiest if model.stages[busiest].boundary_s >= (1 - AS_PREDICTED) * predicted_s else None


def difference_lines(summary: Mapping[str, Any]) -> list[str]:
    """The lines for the table at the end of a run: first the difference, then its largest parts."""
    parts = difference(summary)
    if not parts:
        return []
    total, largest = sum(parts.values()), sorted(parts.items(), key=lambda part: -abs(part[1]))[:4]
    lines = [f"{abs(total) * 1e3:.3g} ms {'more' if total > 0 else 'less'} than predicted for each minibatch, of which"]
    worth = [(name, value) for name, value in largest if abs(value) >= WORTH_A_LINE * abs(total)]
    return lines + [f"  {value * 1e3:+.3g} ms  {_LINES[name]}" for name, value in worth]


def first_cause(summary: Mapping[str, Any]) -> CauseFields | None:
    """The main cause; None if the step time is as predicted, or if a time was not predicted or not measured."""
    model = _model_of(summary)
    if model is None:
        return None
    predicted, measured = float(summary["minibatch_s"]["predicted"]), float(summary["minibatch_s"]["measured"])
    before, after = [one.predicted for one in model.stages], [one.measured for one in model.stages]
    if measured < predicted:
        before, after = after, before
    step_time, low = _within(model, predicted, measured), min(predicted, measured)

    def explained(terms: Sequence[Terms]) -> float:
        return (step_time(terms) - low) / (max(predicted, measured) - low)

    shares = {
        (index, name): explained([*before[:index], {**terms, name: after[index][name]}, *before[index + 1 :]])
        for index, terms in enumerate(before)
        for name in terms
    }
    index, name = max(shares, key=lambda key: shares[key])
    share, waiting = shares[index, name], 1.0 - explained(after)
    if waiting > share or not share:
        return _waiting(model, predicted, measured, waiting)
    return CauseFields(_text(model.stages[index], index, name, share), _TERMS[name][1], index, share)


def _text(stage: StageBusyTimes, index: int, name: str, share: float) -> str:
    measured, predicted = stage.shown[name], stage.predicted[name]
    apart = stage.shown[CORE] > WORTH_SAYING * sum(stage.shown.values()) and name not in (CORE, "sync_s")
    figure = _ms(measured) + (" without waiting for a core" if apart else "")  # the table shows another figure
    took = f"takes {figure} a minibatch, which the prediction leaves out"
    if predicted > 0:
        verb = "take" if name == PASSES else "takes"
        took = f"{verb} {measured / predicted:.2f} times the predicted time ({figure}, predicted {_ms(predicted)})"
    why = f"{_reason(stage, name)} (this alone explains {share:.0%} of the difference)"
    return f"{_TERMS[name][2].format(index)} {took}: {why}"


def _reason(stage: StageBusyTimes, name: str) -> str:
    """The usual reason why a time differs from the prediction, and a remedy."""
    slower = stage.shown[name] > stage.predicted[name]
    why = f"its {'optimiser was' if name == 'update_s' else 'layers were'} profiled under another load"
    if name == "update_s" and slower and stage.versions > 1:
        why += f", and its weights are copied for the {stage.versions} versions that it may keep"
    elif name != "update_s" and stage.modelled:
        why = "its profile is an estimate, not measured"
    if _TERMS[name][0] == MACHINE:
        return f"{why}; `pipeplan calibrate` predicts by what was measured"
    if name == "sync_s":
        return "their link, and the slowest of the replicas, decide" if slower else "they hide behind computing"
    few = "it dominates where stages compute little; larger minibatches or fewer stages help"
    return {CORE: "other programs use this machine", "load_s": "`Data(processes=…)` reads ahead"}.get(name, few)


def _waiting(model: StepTimeModel, predicted_s: float, measured_s: float, share: float) -> CauseFields:
    """The cause if waiting explains more of the difference than any single busy time."""
    busy = [sum(stage.measured.values()) / len(stage.workers) for stage in model.stages]
    index, link = busy.index(max(busy)), _bound_link(model, predicted_s)
    if link is not None:
        text = (
            f"by the plan the link behind stage {link} is busy for {_ms(model.stages[link].boundary_s)} a minibatch, "
            f"and bounds the step time; the busiest stage took {_ms(busy[index])} of the {_ms(measured_s)} measured"
        )
        return CauseFields(text, LINK, link, share)
    text = (
        f"no stage is busy all the time: the busiest, {index}, for {busy[index] / measured_s:.0%} of it "
        f"({_ms(busy[index])} of {_ms(measured_s)} a minibatch); in between the stages wait for each other, or for a "
        f"core: {'filling and draining, ' if model.batch else ''}times that vary, latency, traffic"
    )
    return CauseFields(text, WAITING, None, share)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"

"""The measured times of a run's stages, read from its summary and its workers' metrics, and checked against its plan.

An all-reduce delays a stage by its transfer time. The last replica to join waits only for the transfer. So the transfer
time is the shortest waiting time among the replicas at an update. The other replicas also wait for slower replicas, and
links do not cause that wait.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, DOUBLE_BUFFERED
from pipeplan.problem.options import Options
from pipeplan.run_data.run_folder import MeasuredRun, StageSummary

FILLING = 2
"""Number of updates at the beginning of an epoch that are left out."""
FEWEST = 10
"""Smallest number of steady-state minibatches of the last stage for which a step time counts as measured."""
LONGEST_LINE = 1 << 16
"""Largest number of bytes that are read of a line of metrics. A valid line has a few hundred."""


def hides_allreduce(plan: Plan, index: int) -> bool:
    """Whether other passes come between the start of a stage's all-reduce and its update."""
    return plan.lag(index) > 0 or plan.schedule == DOUBLE_BUFFERED


def update_group(plan: Plan, index: int) -> int:
    """Number of minibatches of the pipeline for each update of a stage."""
    accumulated = plan.accumulate if plan.schedule in ACCUMULATING else None
    return accumulated or plan.stages[index].replicas


def transfers_s(folder: Path, plan: Plan) -> tuple[float | None, ...]:
    """Transfer time of one all-reduce of each stage, in seconds, as the median over updates; None if unknown."""
    return tuple(_transfer_s(folder, plan, index) for index in range(len(plan.stages)))


def _transfer_s(folder: Path, plan: Plan, index: int) -> float | None:
    stage = plan.stages[index]
    if plan.inference or stage.replicas == 1 or hides_allreduce(plan, index):
        return None
    waited: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for worker in stage.workers:
        for epoch, minibatch, sync_s in _lines(folder / "metrics" / f"rank-{worker}.jsonl"):
            group = minibatch // update_group(plan, index)
            if group >= FILLING:
                waited[epoch, group][worker] += sync_s
    transfers = [min(times.values()) for times in waited.values() if len(times) == stage.replicas]
    return statistics.median(transfers) if transfers else None


def _lines(path: Path) -> Iterator[tuple[int, int, float]]:
    """(epoch, minibatch, all-reduce time) of every complete line; empty if the path is not a regular file."""
    if not path.is_file():
        return
    with suppress(OSError), path.open("rb") as file:
        for line in iter(partial(file.readline, LONGEST_LINE), b""):
            try:
                step = json.loads(line)
                epoch, minibatch, sync_s = int(step["epoch"]), int(step["minibatch"]), float(step["sync_s"])
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                continue
            if 0 <= sync_s < math.inf:
                yield epoch, minibatch, sync_s


class BusyTimes(NamedTuple):
    """Busy time of one replica of a stage, in seconds per minibatch that it computed."""

    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float
    """Time spent waiting for all-reduces."""
    load_s: float
    """Time spent reading samples."""
    own_s: float
    """Time spent sending tensors and on the remaining work of the executor."""

    @property
    def total_s(self) -> float:
        """The sum of all times."""
        return math.fsum(self)

    def scaled(self, factor: float) -> BusyTimes:
        """These times, each multiplied by a factor."""
        return BusyTimes(*(time_s * factor for time_s in self))


@dataclass(frozen=True)
class ObservedRun:
    """The measurements of one run, or the medians of several runs of one plan."""

    name: str
    """Name of the run's folder."""
    plan: Plan
    options: Options
    step_time_s: float
    """Measured seconds per minibatch of the pipeline."""
    predicted_s: float
    minibatches: int
    """Number of measured minibatches."""
    stages: tuple[BusyTimes, ...]
    """Busy times by stage. If workers share cores, waiting for a core is excluded."""
    shares: tuple[float, ...]
    """By stage, share of the measured times without the wait for a core; 1 if no cores are shared."""
    shared: bool = False
    """Whether workers share cores."""
    transfers_s: tuple[float | None, ...] = ()
    """Seconds that the last replica to join an all-reduce waits for it, by stage; None if unknown."""
    disturbed: float = 0.0
    """Largest share of its time that any worker waited for a core, if no cores are shared; else 0."""


def observe_run(run: MeasuredRun, path: Path, plan: Plan, options: Options, shared: bool) -> ObservedRun:
    """Read the measurements of a run of the plan in the plan.json at `path`; `shared` says whether workers share cores.

    Raises `InputError` if the run is too short, incomplete, or a run of another plan.
    """
    summary = run.summary
    if summary.emulated:
        raise InputError(
            f"{run.folder} is a run of emulated stages, which repeat the times of their plan: run the plan itself"
        )
    step_time_s, steady = summary.minibatch_s.measured, summary.steady_minibatches
    if step_time_s is None or summary.includes_fill or steady < FEWEST:
        raise InputError(
            f"{run.folder} has too few minibatches to measure a step time ({steady} after the fill of its epochs, "
            f"at least {FEWEST} are needed): run it for longer"
        )
    if not step_time_s:
        raise InputError(f"{run.where}: minibatch_s: the measured step time is zero: run it again")
    if summary.minibatch_s.predicted is None:
        raise InputError(f"{run.where}: minibatch_s: the field 'predicted' is missing")
    stages = summary.stages
    if len(stages) != len(plan.stages):
        raise InputError(f"{run.folder} measured {len(stages)} stages, and {path} has {len(plan.stages)}")
    measured = [
        _busy(stage, plan.inference, shared, f"{run.where}: stages[{index}]") for index, stage in enumerate(stages)
    ]
    waited = [
        (stage.measured.core_wait_s or 0.0) / busy.total_s for stage, (busy, _) in zip(stages, measured, strict=True)
    ]
    return ObservedRun(
        name=run.folder.name,
        plan=plan,
        options=options,
        step_time_s=step_time_s,
        predicted_s=summary.minibatch_s.predicted,
        minibatches=steady,
        stages=tuple(busy for busy, _ in measured),
        shares=tuple(share for _, share in measured),
        shared=shared,
        transfers_s=transfers_s(run.folder, plan),
        disturbed=0.0 if shared else max(waited),
    )


def median_run(runs: Sequence[ObservedRun]) -> ObservedRun:
    """The medians of several runs of one plan, so that a disturbed run has little effect."""
    first = runs[0]
    if len(runs) == 1:
        return first

    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    count = range(len(first.stages))
    stages = [
        BusyTimes(*map(statistics.median, zip(*(run.stages[index] for run in runs), strict=True))) for index in count
    ]
    return replace(
        first,
        name=f"{first.name} and {len(runs) - 1} more",
        step_time_s=statistics.median(run.step_time_s for run in runs),
        minibatches=min(run.minibatches for run in runs),
        stages=tuple(stages),
        shares=tuple(statistics.median(run.shares[index] for run in runs) for index in count),
        transfers_s=tuple(middle(run.transfers_s[index] for run in runs) for index in count),
        disturbed=statistics.median(run.disturbed for run in runs),
    )


def _busy(stage: StageSummary, inference: bool, shared: bool, where: str) -> tuple[BusyTimes, float]:
    own = stage.measured
    if own.cpu_s is None or own.other_s is None:
        raise InputError(f"{where}: `cpu_s` and `other_s` are missing: the run is of an older version, so run it again")
    for name in ("forward_s",) if inference else ("forward_s", "backward_s"):
        if not getattr(stage, name).measured:
            raise InputError(
                f"{where}: {name}: measured no time at all: there is nothing to calibrate by, so run it again"
            )
    busy = BusyTimes(
        forward_s=stage.forward_s.measured or 0.0,
        backward_s=0.0 if inference else stage.backward_s.measured or 0.0,
        update_s=0.0 if inference else stage.update_s.measured or 0.0,
        sync_s=0.0 if inference else stage.sync_s.measured or 0.0,
        load_s=own.load_s or 0.0,
        own_s=(own.send_s or 0.0) + own.other_s,
    )
    share = own.cpu_s / busy.total_s if shared else 1.0
    if share <= 0:
        raise InputError(f"{where}: measured: cpu_s: measured no computing at all: run it again")
    return busy.scaled(share), share

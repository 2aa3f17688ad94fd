"""What a run measured of every stage, read from its summary and checked against the plan that ran."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pipeplan.calibrate.waits import transfers_s
from pipeplan.errors import InputError
from pipeplan.files import Node
from pipeplan.measured.run import Run
from pipeplan.plan import Plan
from pipeplan.problem import Options

FEWEST = 10
"""Minibatches of the steady state, of the last stage: fewer say nothing of a pace."""


@dataclass(frozen=True)
class Busy:
    """What one replica of a stage was busy with, s for each minibatch that it computed."""

    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float
    """Held up by all-reduces."""
    load_s: float
    """Reading samples."""
    own_s: float
    """Handing tensors over, and all else that the executor does."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return math.fsum(getattr(self, field.name) for field in fields(self))

    def scaled(self, factor: float) -> Busy:
        """All of it, times a factor."""
        return Busy(*(getattr(self, field.name) * factor for field in fields(self)))


@dataclass(frozen=True)
class Observed:
    """One run."""

    name: str
    """Of its folder, for people."""
    plan: Plan
    options: Options
    pace_s: float
    """Measured, s for each minibatch of the pipeline."""
    predicted_s: float
    minibatches: int
    """That it was measured on."""
    stages: tuple[Busy, ...]
    """Where workers share cores, what they computed: what they waited for a core is left out."""
    shares: tuple[float, ...]
    """What that left of the measured times, by stage; 1 where no cores are shared."""
    shared: bool = False
    """Whether workers share cores."""
    transfers_s: tuple[float | None, ...] = ()
    """How long one all-reduce holds up the replica that comes last to it, by stage; None where that is not known."""
    disturbed: float = 0.0
    """Share of its time that the worker most disturbed waited for a core, where none are shared."""


def observe(run: Run, path: Path, plan: Plan, options: Options, shared: bool) -> Observed:
    """What a run of the plan in a plan.json measured. `shared`: whether workers share cores.

    Raises `InputError` where the run is too short, or is not complete.
    """
    summary = run.summary
    emulated = summary.get("emulated")
    if emulated is not None and emulated.boolean():
        raise InputError(f"{run.folder} is of emulated stages, which took the times of their plan: run the plan itself")
    pace = summary["minibatch_s"]["measured"]
    steady = summary["steady_minibatches"].integer()
    if pace.value is None or summary["includes_fill"].boolean() or steady < FEWEST:
        raise InputError(
            f"{run.folder} has too few minibatches to measure a pace ({steady} after the fill of its epochs, "
            f"at least {FEWEST} are needed): run it for longer"
        )
    pace_s = pace.number()
    if pace_s <= 0:
        pace.fail("the measured pace is zero: run it again")
    nodes = summary["stages"].items()
    if len(nodes) != len(plan.stages):
        raise InputError(f"{run.folder} measured {len(nodes)} stages, and {path} has {len(plan.stages)}")
    found = [_busy(node, plan.inference, shared) for node in nodes]
    return Observed(
        name=run.folder.name,
        plan=plan,
        options=options,
        pace_s=pace_s,
        predicted_s=summary["minibatch_s"]["predicted"].number(),
        minibatches=steady,
        stages=tuple(busy for busy, _ in found),
        shares=tuple(share for _, share in found),
        shared=shared,
        transfers_s=transfers_s(run.folder, plan),
        disturbed=0.0 if shared else max(_waited(node, busy) for node, (busy, _) in zip(nodes, found, strict=True)),
    )


def median(runs: Sequence[Observed]) -> Observed:
    """Several runs of one plan as one: of every figure the median, so that one that others disturbed counts little."""
    first = runs[0]
    if len(runs) == 1:
        return first

    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    count = range(len(first.stages))
    stages = [
        Busy(*(statistics.median(getattr(run.stages[index], one.name) for run in runs) for one in fields(Busy)))
        for index in count
    ]
    return replace(
        first,
        name=f"{first.name} and {len(runs) - 1} more",
        pace_s=statistics.median(run.pace_s for run in runs),
        minibatches=min(run.minibatches for run in runs),
        stages=tuple(stages),
        shares=tuple(statistics.median(run.shares[index] for run in runs) for index in count),
        transfers_s=tuple(middle(run.transfers_s[index] for run in runs) for index in count),
        disturbed=statistics.median(run.disturbed for run in runs),
    )


def _waited(node: Node, busy: Busy) -> float:
    waited = node["measured"].get("core_wait_s")
    return waited.number() / busy.total_s if waited else 0.0


def _busy(node: Node, inference: bool, shared: bool) -> tuple[Busy, float]:
    own = node["measured"]
    if own.get("cpu_s") is None or own.get("other_s") is None:
        node.fail("its times of `cpu_s` and `other_s` are missing: it is of an older version, so run it again")
    forward = node["forward_s"]["measured"]
    needed = [forward] if inference else [forward, node["backward_s"]["measured"]]
    for one in needed:
        if one.number() <= 0:
            one.fail("measured no time at all: there is nothing to calibrate by, so run it again")
    busy = Busy(
        forward_s=forward.number(),
        backward_s=0.0 if inference else node["backward_s"]["measured"].number(),
        update_s=0.0 if inference else node["update_s"]["measured"].number(),
        sync_s=0.0 if inference else node["sync_s"]["measured"].number(),
        load_s=own["load_s"].number(),
        own_s=own["send_s"].number() + own["other_s"].number(),
    )
    share = own["cpu_s"].number() / busy.total_s if shared else 1.0
    if share <= 0:
        own["cpu_s"].fail("measured no computing at all: run it again")
    return busy.scaled(share), share

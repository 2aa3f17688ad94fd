"""The runs of the self-test and their plan folders. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeplan_launch.plan.stage_files import STAGE_FORMAT
from pipeplan_launch.plan.transport_modes import GLOO, NCCL

JOB = "pipeplan_launch.selftest.reference:build"
MINIBATCH, MINIBATCHES = 4, 16
"""Samples of a minibatch, and minibatches of an epoch."""
LAYERS = {1: [["0", "1", "2", "3", "4", "loss"]], 2: [["0", "1", "2"], ["3", "4", "loss"]]}
"""Names of the job's layers, for one stage and for two."""
ACCUMULATING = ("2bw", "gpipe", "1f1b-flush")
CHECKPOINT_MINIBATCHES = 8


@dataclass(frozen=True)
class Case:
    """A run of the self-test."""

    replicas: tuple[int, ...]
    schedule: str
    transport: str = GLOO
    is_killed: bool = False
    """Whether a worker is killed once, and, after a restart, the run is resumed for another epoch."""

    @property
    def name(self) -> str:
        """The case in a table: plan, schedule and how messages travel."""
        way = "" if self.transport == GLOO else f", {self.transport}"
        ending = ", a worker killed, then resumed" if self.is_killed else ""
        return f"{'-'.join(map(str, self.replicas))}, {self.schedule}{way}{ending}"

    @property
    def depths(self) -> list[int]:
        """Minibatches in flight on a replica, by stage."""
        depths: list[int] = []
        for count, after in reversed(list(zip(self.replicas, (*self.replicas[1:], 0), strict=True))):
            depths.insert(0, 1 + (-(-depths[0] * after // count) if depths else 0))
        return [-(-self.accumulate // r) for r in self.replicas] if self.schedule == "gpipe" else depths

    @property
    def accumulate(self) -> int:
        """Minibatches of an update, for schedules that take such a number."""
        return 4 if max(self.replicas) < 3 else 6

    @property
    def epochs(self) -> int:
        """Epochs of the run in all."""
        return 2 if self.is_killed else 1

    @property
    def segments(self) -> list[int]:
        """Minibatches of every segment: checkpoints in the middle of an epoch drain the pipeline."""
        parts = MINIBATCHES // CHECKPOINT_MINIBATCHES
        return [CHECKPOINT_MINIBATCHES] * (parts * self.epochs) if self.is_killed else [MINIBATCHES]


def cases(workers: int) -> list[Case]:
    """The runs for so many workers at once, the most telling first: each schedule, each mode, each shape of plan."""
    if workers < 2:
        return [Case((1,), "1f1b-stashing")]
    ordered = [Case((1, 1), "1f1b-stashing", NCCL), Case((1, 1), "vertical-sync", NCCL)]
    found = [Case((1, 1), "1f1b-stashing"), *ordered, Case((1,), "1f1b-stashing"), Case((2,), "1f1b-stashing")]
    found += [Case((1, 1), name) for name in ("2bw", "gpipe")]
    found.append(Case((1, 1), "1f1b-flush", is_killed=True))
    for replicas in ((2, 1), (1, 2), (2, 2), (3, 2)):
        if sum(replicas) <= workers:
            found += [Case(replicas, "1f1b-stashing", mode) for mode in (NCCL, GLOO)]
    return found


def short_cases(workers: int) -> list[Case]:
    """The run that decides which mode a machine with GPUs uses, for launch.sh."""
    return [Case((1, 1), "1f1b-stashing", NCCL)] if workers > 1 else []


def write_plan(folder: Path, case: Case, device: str) -> Path:
    """Write the stage files of a case into a plan folder; returns it."""
    pipeline, first = [], 0
    for count, depth in zip(case.replicas, case.depths, strict=True):
        pipeline.append({"workers": list(range(first, first + count)), "depth": depth, "versions": depth + 1})
        first += count
    schedule: dict[str, Any] = {"name": case.schedule}
    if case.schedule in ACCUMULATING:
        schedule["accumulate"] = case.accumulate
    shared = {
        "format": STAGE_FORMAT,
        "version": 1,
        "plan": "sha256:selftest",
        "mode": "training",
        "model": {"ref": JOB, "graph_hash": None},
        "minibatch": MINIBATCH,
        "device": device,
        "servers": 1,
        "workers_per_server": first,
        "schedule": schedule,
        "pipeline": pipeline,
        "prediction": {"minibatch_s": 0.01},
    }
    (folder / "stages").mkdir(parents=True)
    for stage, layers in enumerate(LAYERS[len(case.replicas)]):
        content = json.dumps(shared | {"stage": stage, "layers": layers})
        (folder / "stages" / f"stage-{stage}.json").write_text(content, encoding="utf-8")
    return folder


@dataclass
class Result:
    """The result of a case or of a measurement."""

    name: str
    passed: bool
    text: str
    """The finding in one line."""
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)


def verdict(results: Sequence[tuple[Case, Result]], device: str) -> str:
    """The mode for `--transport auto`: `nccl` if every run by it passed, else `gloo`."""
    tried = [result for case, result in results if case.transport == NCCL]
    return NCCL if device != "cpu" and tried and all(result.passed for result in tried) else GLOO

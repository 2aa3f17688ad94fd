"""Real workers for the tests of weight semantics, forked from a host that has the traced models already.

Every worker runs the executor's own `main`, from reading the plan's stage files to the last checkpoint. Only building
and tracing the model are taken from the parent, which has done so with the executor's own `trace`: that takes longer
than training it. What each worker is left with, replicas included, is what it hands back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from feature_workers import cut_before
from semantics_models import ALL_SUBJECTS, OPTIMIZERS, job_of
from torch import Tensor
from toy_workers import STAGE, write_plan
from worker_host import start_attempt

from pipeplan_launch.plan.schedule import SCHEDULES
from pipeplan_launch.tracing import split
from pipeplan_launch.tracing.split import StageProgram
from pipeplan_launch.tracing.trace import TracedModel, trace_job


@dataclass(frozen=True)
class Case:
    """A training run."""

    subject: str
    schedule: str
    replicas: tuple[int, ...]
    depths: tuple[int, ...]
    accumulate: int
    optimizer: str
    samples: int
    minibatch: int = 3
    epochs: int = 2
    seed: int = 0
    dropout: bool = True
    recompute: bool = False
    clip: float | None = None
    correction: str = "none"
    flush_epochs: int = 0
    transport: str = "auto"
    shards: bool = False
    resume: Path | None = None
    """The folder of a run to go on from."""
    deferred: tuple[int, ...] | None = None
    """Minibatches whose gradients of weights each stage puts off; None for as many as its number."""
    devices: int | None = None
    """Positions of the pipeline, where workers run several stages each; else None."""
    layers_between: tuple[str, ...] | None = None
    """Where the second and later stages begin; None for the places that the model names."""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return sum(self.replicas) if self.devices is None else self.devices * self.replicas[0]

    @property
    def ranks(self) -> list[list[int]]:
        """The workers of each stage."""
        if self.devices is None:
            return _ranks(self.replicas)
        virtual = SCHEDULES[self.schedule].virtual
        assert virtual is not None
        of_devices = _ranks(self.replicas[: self.devices])
        return [of_devices[virtual.device_of(stage, self.devices)] for stage in range(len(self.replicas))]

    @property
    def cuts(self) -> tuple[str, ...]:
        """Where the second and later stages begin: with two stages, at a place that depends on the shape."""
        if self.layers_between is not None:
            return self.layers_between
        cuts = ALL_SUBJECTS[self.subject].cuts
        return cuts if len(self.replicas) == 3 else cuts[self.replicas[-1] > 1 :][: len(self.replicas) - 1]


Left = dict[str, dict[str, Tensor]]
"""`parameters` and `buffers` of a worker, by name."""


class CaseRun:
    """The workers of a case, started, and what they leave behind."""

    def __init__(self, folder: Path, case: Case) -> None:
        """Start the workers; stage files and what is left go into `folder`."""
        self._folder, self._case = folder, case
        given = [(folder, case, rank) for rank in range(case.workers)]
        self._workers = start_attempt(_work, given, folder, prepare=(_prepare, (folder, case)))

    def left(self) -> list[list[Left]]:
        """Wait for the workers: by stage, what each replica is left with."""
        ended = self._workers.finish()
        assert ended.statuses == [0] * self._case.workers, ended.err
        return [
            [torch.load(self._folder / f"{rank}-{stage}.pt") for rank in ranks]
            for stage, ranks in enumerate(self._case.ranks)
        ]


def _prepare(folder: Path, case: Case) -> TracedModel:
    """Trace the model of a case and write its stage files; the host traces each model once."""
    traced = _traced(case.subject, case.dropout, case.minibatch)
    _write_plan(folder, case, traced)
    return traced


@cache
def _traced(subject: str, dropout: bool, minibatch: int) -> TracedModel:
    return trace_job(job_of(ALL_SUBJECTS[subject], next(iter(OPTIMIZERS)), 6, dropout), minibatch)


def _work(traced: TracedModel, folder: Path, case: Case, rank: int) -> int:
    """Be one worker, and leave its parameters and buffers in a file."""
    from pipeplan_launch import __main__
    from pipeplan_launch.runtime import stage_checkpoint, stage_setup

    stage_checkpoint.BATCH_BYTES = 1  # a divided optimiser is saved in as many batches as it has tensors
    job = job_of(ALL_SUBJECTS[case.subject], case.optimizer, case.samples, case.dropout, case.clip)
    kept: list[StageProgram] = []

    def stage_program(*arguments: Any) -> StageProgram:
        kept.append(split.build_stage_program(*arguments))
        return kept[-1]

    stage_setup.load_job = lambda *_: job
    stage_setup.trace_job = lambda *_: traced
    stage_setup.build_stage_program = stage_program
    given = [
        "--transport",
        case.transport,
        "--run-dir",
        folder / "run",
        "--epochs",
        case.epochs,
        "--seed",
        case.seed,
        "--flush-epochs",
        case.flush_epochs,
        *(() if case.resume is None else ("--resume-from", case.resume)),
        *(("--force-correction",) if case.correction == "ef" else ()),
        *(("--shard-optimizer",) if case.shards else ()),
        "--threads",
        1,
        "--log-every",
        0,
    ]
    status = __main__.main([str(folder), *map(str, given), "--checkpoint-every", str(case.epochs)])
    own = [stage for stage, ranks in enumerate(case.ranks) if rank in ranks]
    for stage, program in zip(own, kept, strict=True):
        left: Left = {"parameters": program.parameters_by_name(), "buffers": program.buffers_by_name()}
        detached = {kind: {name: one.detach().clone() for name, one in of.items()} for kind, of in left.items()}
        torch.save(detached, folder / f"{rank}-{stage}.pt")
    return status


def _ranks(replicas: Sequence[int]) -> list[list[int]]:
    firsts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    return [list(range(first, first + count)) for first, count in zip(firsts, replicas, strict=True)]


def _write_plan(folder: Path, case: Case, traced: TracedModel) -> None:
    """The stage files of a case, as the planner writes them."""
    splits = SCHEDULES[case.schedule].splits
    pipeline = [
        {"workers": ranks, "depth": depth, "versions": depth + 1, "recompute": case.recompute}
        | ({"deferred": number if case.deferred is None else case.deferred[number]} if splits else {})
        for number, (ranks, depth) in enumerate(zip(case.ranks, case.depths, strict=True))
    ]
    shared = STAGE | {
        "mode": "training",
        "model": {"ref": case.subject, "graph_hash": traced.graph_hash},
        "minibatch": case.minibatch,
        "workers_per_server": case.workers,
        "schedule": {"name": case.schedule, "accumulate": case.accumulate, "correction": case.correction},
        "pipeline": pipeline,
    }
    stages = enumerate(cut_before(traced, *case.cuts))
    write_plan(folder, [shared | {"stage": stage, "layers": layers} for stage, layers in stages])

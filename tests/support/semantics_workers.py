"""Real workers for the tests of weight semantics, forked from a process that has the traced models already.

Every worker runs the executor's own `main`, from reading the plan's stage files to the last checkpoint. Only building
and tracing the model are taken from the parent, which has done so with the executor's own `trace`: that takes longer
than training it. What each worker is left with, replicas included, is what it hands back.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from preloaded import PRELOADED
from semantics_models import SUBJECTS, job_of
from torch import Tensor

from pipeplan_launch.tracing import split
from pipeplan_launch.tracing.split import StageProgram
from pipeplan_launch.tracing.trace import TracedModel, trace_job

HUNG_AFTER_S = 60


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

    @property
    def cuts(self) -> tuple[str, ...]:
        """Where the second and later stages begin: with two stages, at a place that depends on the shape."""
        cuts = SUBJECTS[self.subject].cuts
        return cuts if len(self.replicas) == 3 else cuts[self.replicas[-1] > 1 :][: len(self.replicas) - 1]


Left = dict[str, dict[str, Tensor]]
"""`parameters` and `buffers` of a worker, by name."""


class Workers:
    """A process that forks workers, case by case. A context manager."""

    def __enter__(self) -> Workers:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._ours, theirs = context.Pipe()
        self._host = context.Process(target=_host, args=(theirs,))
        self._host.start()
        theirs.close()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._ours.send(None)
        self._host.join(10)
        self._host.kill()

    def start(self, folder: Path, case: Case) -> None:
        """Start the workers of a case; its stage files and what is left go into `folder`."""
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ours.send((folder, case, self._store.port))

    def finish(self, folder: Path, case: Case) -> list[list[Left]]:
        """Wait for them: by stage, what each replica is left with."""
        world = sum(case.replicas)
        answered, statuses = None, []
        while answered != folder:  # a test that failed before it got here left its answer behind
            assert self._ours.poll(2 * HUNG_AFTER_S), "the process that forks workers hangs"
            answered, statuses = self._ours.recv()
        assert statuses == [0] * world, "\n".join((folder / f"{rank}.err").read_text() for rank in range(world))
        return [[torch.load(folder / f"{rank}.pt") for rank in ranks] for ranks in _ranks(case.replicas)]


def _host(requests: Connection) -> None:
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    traced: dict[tuple[str, bool], TracedModel] = {}
    while (request := requests.recv()) is not None:
        folder, case, port = request
        key = case.subject, case.dropout
        if key not in traced:
            traced[key] = trace_job(job_of(SUBJECTS[case.subject], case.optimizer, 6, case.dropout), case.minibatch)
        _write_plan(folder, case, traced[key])
        gc.collect()
        gc.freeze()  # what the fork shares need not be searched, nor copied, by every worker
        world = sum(case.replicas)
        children = [_fork(folder, case, traced[key], port, rank) for rank in range(world)]
        requests.send((folder, _wait(children)))


def _fork(folder: Path, case: Case, traced: TracedModel, port: int, rank: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        status = _work(folder, case, traced, port, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(children: Sequence[int]) -> list[int]:
    """The exit statuses of child processes; who takes too long is killed."""
    statuses: dict[int, int] = {}
    until = time.monotonic() + HUNG_AFTER_S
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses:
                if time.monotonic() > until:
                    os.kill(child, signal.SIGKILL)
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    statuses[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return [statuses[child] for child in children]


def _work(folder: Path, case: Case, traced: TracedModel, port: int, rank: int) -> int:
    """Be one worker, and leave its parameters and buffers in a file."""
    from pipeplan_launch import __main__
    from pipeplan_launch.runtime import stage_setup

    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{end}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    world = str(sum(case.replicas))
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    job = job_of(SUBJECTS[case.subject], case.optimizer, case.samples, case.dropout, case.clip)
    kept: list[StageProgram] = []

    def stage_program(*arguments: Any) -> StageProgram:
        kept.append(split.build_stage_program(*arguments))
        return kept[-1]

    stage_setup.load_job = lambda *_: job
    stage_setup.trace_job = lambda *_: traced
    stage_setup.build_stage_program = stage_program
    given = [
        "--run-dir",
        folder / "run",
        "--epochs",
        case.epochs,
        "--seed",
        case.seed,
        "--threads",
        1,
        "--log-every",
        0,
    ]
    status = __main__.main([str(folder), *map(str, given), "--checkpoint-every", str(case.epochs)])
    (program,) = kept
    left: Left = {"parameters": program.parameters_by_name(), "buffers": program.buffers_by_name()}
    detached = {kind: {name: one.detach().clone() for name, one in of.items()} for kind, of in left.items()}
    torch.save(detached, folder / f"{rank}.pt")
    return status


def _ranks(replicas: Sequence[int]) -> list[list[int]]:
    firsts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    return [list(range(first, first + count)) for first, count in zip(firsts, replicas, strict=True)]


def _layers(traced: TracedModel, cuts: Sequence[str]) -> list[list[str]]:
    """The layers of each stage, in the order in which the model runs."""
    stages: list[list[str]] = [[]]
    for layer in traced.layers:
        if layer.name in cuts:
            stages.append([])
        stages[-1].append(layer.name)
    return stages


def _write_plan(folder: Path, case: Case, traced: TracedModel) -> None:
    """The stage files of a case, as the planner writes them."""
    pipeline = [
        {"workers": ranks, "depth": depth, "versions": depth + 1, "recompute": case.recompute}
        for ranks, depth in zip(_ranks(case.replicas), case.depths, strict=True)
    ]
    shared = {
        "format": "pipeplan-stage",
        "version": 1,
        "plan": "sha256:plan",
        "mode": "training",
        "model": {"ref": case.subject, "graph_hash": traced.graph_hash},
        "minibatch": case.minibatch,
        "device": "cpu",
        "servers": 1,
        "workers_per_server": sum(case.replicas),
        "schedule": {"name": case.schedule, "accumulate": case.accumulate},
        "pipeline": pipeline,
    }
    (folder / "stages").mkdir(parents=True)
    for stage, layers in enumerate(_layers(traced, case.cuts)):
        content = shared | {"stage": stage, "layers": layers}
        (folder / "stages" / f"stage-{stage}.json").write_text(json.dumps(content))

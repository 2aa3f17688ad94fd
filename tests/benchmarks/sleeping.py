"""Stages that sleep where others compute, and how a plan of them is run through the executor. For the benchmarks.

Sleep stands for all that computing does, the writing of its results included: those lie ready. What is left is what
the executor does, and the machine for it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeplan import cost


@dataclass(frozen=True)
class Load:
    """What a stage does to a minibatch."""

    forward_s: float
    backward_s: float
    floats: int
    """Numbers of 4 bytes that cross each cut."""


@dataclass(frozen=True)
class How:
    """How the workers run."""

    shared_memory: bool = True
    """Whether messages take the way through shared memory; else all go over Gloo."""
    pinned: bool = False
    """Each worker to one core, evenly: with nothing to compute, Linux may well leave a core idle."""


@dataclass(frozen=True)
class Crossing:
    name: str
    floats: int
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    def shape(self, _batch: int) -> tuple[int, ...]:
        return (self.floats,)


class Sleep(torch.autograd.Function):
    """Sleeps where a stage computes. What it would write, its output and its gradient, lies ready."""

    @staticmethod
    def forward(ctx: Any, _received: Tensor | None, _weight: Tensor, stage: SleepingStage) -> Tensor:
        ctx.stage = stage
        if stage.load.forward_s:
            time.sleep(stage.load.forward_s)
        return stage.output.detach()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor | None, ...]:
        stage = ctx.stage
        if stage.load.backward_s:
            time.sleep(stage.load.backward_s)
        return stage.gradient.detach() if stage.receives else None, torch.ones(1), None


class SleepingStage(nn.Module):
    """A stage that sleeps, with one parameter."""

    def __init__(self, stage: int, stages: int, load: Load) -> None:
        super().__init__()
        crossing = (Crossing("x", load.floats),)
        self.receives: Sequence[Crossing] = crossing if stage else ()
        self.sends: Sequence[Crossing] = crossing if stage < stages - 1 else ()
        self.model_inputs: Sequence[int] = ()
        self._weights = {f"w{stage}": nn.Parameter(torch.zeros(1))}
        self.output = torch.zeros(load.floats if self.sends else 1)
        self.gradient = torch.zeros(load.floats)
        self.load = load

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return self._weights

    def buffers_by_name(self) -> dict[str, Tensor]:
        return {}

    def call(
        self, parameters: Mapping[str, Tensor], received: Sequence[Tensor], _inputs: Sequence[Tensor], _batch: int
    ) -> Any:
        (weight,) = parameters.values()
        out = Sleep.apply(received[0] if received else None, weight, self)
        return (out,) if self.sends else out


def run(folder: Path, replicas: Sequence[int], load: Load, minibatches: int, how: How | None = None) -> dict[str, Any]:
    """Run a plan; returns its summary, and under `cpu_s` the CPU seconds a minibatch of each worker, by rank."""
    write_plan(folder, replicas)
    start(work, sum(replicas), folder, load, minibatches, how or How())
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary | {"cpu_s": [float((folder / f"cpu-{rank}").read_text()) for rank in range(sum(replicas))]}


def start(target: Callable[..., None], world: int, *arguments: object) -> None:
    """Run `target(rank, world, port, *arguments)` in so many processes that have torch already, to their end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "pipeplan_launch.worker"])
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [context.Process(target=target, args=(rank, world, store.port, *arguments)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def place(rank: int, world: int, port: int, how: How) -> None:
    """Tell a process which worker it is, as torchrun would."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["PIPEPLAN_SHARED_MEMORY"] = str(int(how.shared_memory))
    if how.pinned:
        os.sched_setaffinity(0, {rank * (os.cpu_count() or 1) // world})


def depths_of(replicas: Sequence[int]) -> list[int]:
    """The planner's depths for transfers of half the pace."""
    depths = [1]
    for here, following in zip(replicas[-2::-1], replicas[:0:-1], strict=True):
        behind = cost.in_flight_behind(depths[0], following, 0.0)
        depths.insert(0, int(cost.in_flight_depth(behind, 0.0, 0.5, 1.0, here)))
    return depths


def write_plan(folder: Path, replicas: Sequence[int]) -> None:
    """The stage files of a plan."""
    ranks = iter(range(sum(replicas)))
    pipeline = [
        {"workers": [next(ranks) for _ in range(count)], "depth": depth, "versions": depth}
        for count, depth in zip(replicas, depths_of(replicas), strict=True)
    ]
    (folder / "stages").mkdir(parents=True)
    for stage in range(len(replicas)):
        content = {
            "format": "pipeplan-stage",
            "version": 1,
            "plan": "sha256:benchmark",
            "mode": "training",
            "model": {"ref": "sleep", "graph_hash": None},
            "minibatch": 1,
            "device": "cpu",
            "servers": 1,
            "workers_per_server": sum(replicas),
            "schedule": {"name": "1f1b-stashing"},
            "stage": stage,
            "layers": [f"layer{stage}"],
            "pipeline": pipeline,
        }
        (folder / "stages" / f"stage-{stage}.json").write_text(json.dumps(content))


def work(rank: int, world: int, port: int, folder: Path, load: Load, minibatches: int, how: How) -> None:
    """Be one worker."""
    from pipeplan_launch import __main__, setup
    from pipeplan_launch.job import Data, Job
    from pipeplan_launch.training import TrainingEngine

    place(rank, world, port, how)
    data = TensorDataset(torch.zeros(minibatches, 1), torch.zeros(minibatches, 1))
    stages = len(list((folder / "stages").iterdir()))

    def load_stage(plan: Any, stage: int, _seed: int, _device: torch.device) -> tuple[Any, ...]:
        replicas = len(plan.pipeline[stage].workers)
        mine = Load(load.forward_s * replicas, load.backward_s * replicas, load.floats)
        job = Job(nn.Module(), loss=lambda output, _: output.sum(), data=lambda: Data(data))
        return job, SleepingStage(stage, stages, mine), "sha256:none", True

    run_segment = TrainingEngine.run

    def timed(engine: TrainingEngine, segment: Any) -> int:
        began = time.process_time()
        count = run_segment(engine, segment)
        own = max(1, count // engine.place.replicas)
        (folder / f"cpu-{rank}").write_text(str((time.process_time() - began) / own))
        return count

    setup._load_stage, TrainingEngine.run = load_stage, timed  # type: ignore[assignment, method-assign]
    with open(os.devnull, "w") as sink:
        sys.stdout = sys.stderr = sink
        status = __main__.main([str(folder), "--epochs", "1", "--threads", "1", "--run-dir", str(folder / "run")])
        os._exit(status)

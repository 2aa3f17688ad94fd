"""How near to its ideal pace the executor runs, with compute replaced by sleep, and what it costs per minibatch.

    python tests/benchmarks/executor_pace.py [--minibatches N]

A stage with r replicas sleeps r x 20 ms forward and r x 40 ms backward for each of its minibatches, so that
the ideal pace of every plan is 60 ms a minibatch. The last lines replace compute by nothing: what is left is overhead.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeplan import cost

FORWARD_S, BACKWARD_S = 0.020, 0.040
PLANS = ([1, 1], [1, 1, 1, 1], [2, 1], [3, 1], [1, 2], [2, 1, 1], [3, 2, 1])


@dataclass(frozen=True)
class Load:
    """What a stage does to a minibatch."""

    forward_s: float
    backward_s: float
    floats: int
    """Numbers of 4 bytes that cross each cut."""


@dataclass(frozen=True)
class Crossing:
    name: str
    floats: int
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    def shape(self, _batch: int) -> tuple[int, ...]:
        return (self.floats,)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.backward_s)
        return gradient, torch.ones(1), None, None


class SleepingStage(nn.Module):
    """A stage that sleeps, with one parameter."""

    def __init__(self, stage: int, stages: int, load: Load) -> None:
        super().__init__()
        crossing = (Crossing("x", load.floats),)
        self.receives: Sequence[Crossing] = crossing if stage else ()
        self.sends: Sequence[Crossing] = crossing if stage < stages - 1 else ()
        self.model_inputs: Sequence[int] = ()
        self._weights = {f"w{stage}": nn.Parameter(torch.zeros(1))}
        self._source = torch.zeros(load.floats)
        self._load = load

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return self._weights

    def buffers_by_name(self) -> dict[str, Tensor]:
        return {}

    def call(
        self, parameters: Mapping[str, Tensor], received: Sequence[Tensor], _inputs: Sequence[Tensor], _batch: int
    ) -> Any:
        (weight,) = parameters.values()
        out = Sleep.apply(
            received[0] if received else self._source, weight, self._load.forward_s, self._load.backward_s
        )
        return (out,) if self.sends else out


def run(folder: Path, replicas: Sequence[int], load: Load, minibatches: int) -> dict[str, Any]:
    """Run a plan; returns its summary."""
    world = sum(replicas)
    write_plan(folder, replicas)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "pipeplan_launch.worker"])
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        context.Process(target=work, args=(rank, world, store.port, folder, load, minibatches)) for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def write_plan(folder: Path, replicas: Sequence[int]) -> None:
    """The stage files of a plan, with the planner's depths for transfers of half the pace."""
    depths = [1]
    for here, following in zip(replicas[-2::-1], replicas[:0:-1], strict=True):
        behind = cost.in_flight_behind(depths[0], following, 0.0)
        depths.insert(0, int(cost.in_flight_depth(behind, 0.0, 0.5, 1.0, here)))
    ranks = iter(range(sum(replicas)))
    pipeline = [
        {"workers": [next(ranks) for _ in range(count)], "depth": depth, "versions": depth}
        for count, depth in zip(replicas, depths, strict=True)
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


def work(rank: int, world: int, port: int, folder: Path, load: Load, minibatches: int) -> None:
    """Be one worker."""
    from pipeplan_launch import __main__, setup
    from pipeplan_launch.job import Data, Job

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    data = TensorDataset(torch.zeros(minibatches, 1), torch.zeros(minibatches, 1))
    stages = len(list((folder / "stages").iterdir()))

    def load_stage(plan: Any, stage: int, _seed: int, _device: torch.device) -> tuple[Any, ...]:
        replicas = len(plan.pipeline[stage].workers)
        mine = Load(load.forward_s * replicas, load.backward_s * replicas, load.floats)
        job = Job(nn.Module(), loss=lambda output, _: output.sum(), data=lambda: Data(data))
        return job, SleepingStage(stage, stages, mine), "sha256:none", True

    setup.load_stage = load_stage  # type: ignore[assignment]
    with open(os.devnull, "w") as sink:
        sys.stdout = sys.stderr = sink
        status = __main__.main([str(folder), "--epochs", "1", "--threads", "1", "--run-dir", str(folder / "run")])
        os._exit(status)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatches", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print(f"{'plan':>8}  {'MB across':>9}  {'ms/minibatch':>12}  share of the ideal pace")
    for floats in (25_000, 4_000_000):
        for replicas in PLANS if floats < 1e6 else PLANS[:3]:
            paces = []
            for _ in range(given.repeats):
                with tempfile.TemporaryDirectory() as folder:
                    load = Load(FORWARD_S, BACKWARD_S, floats)
                    summary = run(Path(folder) / "plan", replicas, load, given.minibatches)
                    paces.append(summary["minibatch_s"]["measured"])
            pace = statistics.median(paces)
            share = (FORWARD_S + BACKWARD_S) / pace
            name = "-".join(map(str, replicas))
            print(f"{name:>8}  {floats * 4e-6:9.1f}  {pace * 1e3:12.2f}  {share:.3f}", flush=True)
    for replicas in ([1, 1], [1, 1, 1, 1], [2, 1]):
        with tempfile.TemporaryDirectory() as folder:
            summary = run(Path(folder) / "plan", replicas, Load(0.0, 0.0, 25_000), 2000)
        pace = summary["minibatch_s"]["measured"] * 1e3
        print(
            f"{'-'.join(map(str, replicas)):>8}  {0.1:9.1f}  {pace:12.2f}  without compute: overhead only", flush=True
        )


if __name__ == "__main__":
    main()

"""Plans whose stages sleep instead of computing, run through the executor: the benchmarks of its own overhead use them.

The stages are those of `pipeplan_launch.runtime.sleeping_stage`. Their results are prepared in advance, so that only
the work of the executor and of the machine remains.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeplan.cost import formulas


@dataclass(frozen=True)
class Load:
    """The work of a stage for a minibatch."""

    forward_s: float
    backward_s: float
    floats: int
    """Count of the 4-byte numbers that cross each cut."""


@dataclass(frozen=True)
class How:
    """Options of the workers."""

    pinned: bool = False
    """Whether each worker is bound to one core, evenly. Linux may otherwise leave a core idle."""


def run(folder: Path, replicas: Sequence[int], load: Load, minibatches: int, how: How | None = None) -> dict[str, Any]:
    """Run a plan. Returns its summary, with the CPU seconds per minibatch of each worker, by rank, under `cpu_s`."""
    write_plan(folder, replicas, load, minibatches)
    start(work, sum(replicas), folder, how or How())
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary | {"cpu_s": [float((folder / f"cpu-{rank}").read_text()) for rank in range(sum(replicas))]}


def start(target: Callable[..., None], world: int, *arguments: object) -> None:
    """Run `target(rank, world, port, *arguments)` in `world` processes with torch preloaded, and wait for their end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "pipeplan_launch.worker"])
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [context.Process(target=target, args=(rank, world, store.port, *arguments)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def place(rank: int, world: int, port: int, how: How) -> None:
    """Set the environment of a worker's process as torchrun does."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if how.pinned:
        os.sched_setaffinity(0, {rank * (os.cpu_count() or 1) // world})


def depths_of(replicas: Sequence[int]) -> list[int]:
    """The planner's in-flight depths for transfers that take half the pace."""
    depths = [1]
    for count, following in zip(replicas[-2::-1], replicas[:0:-1], strict=True):
        behind = formulas.in_flight_behind(depths[0], following, 0.0)
        depths.insert(0, int(formulas.in_flight_depth(behind, 0.0, 0.5, 1.0, count)))
    return depths


def write_plan(folder: Path, replicas: Sequence[int], load: Load, minibatches: int) -> None:
    """Write the stage files of a plan with so many minibatches an epoch. A stage's load is shared by its replicas."""
    ranks = iter(range(sum(replicas)))
    pipeline = [
        {"workers": [next(ranks) for _ in range(count)], "depth": depth, "versions": depth}
        for count, depth in zip(replicas, depths_of(replicas), strict=True)
    ]
    crossing = {"sent": 4 * load.floats, "returned": 4 * load.floats}
    (folder / "stages").mkdir(parents=True)
    for stage, count in enumerate(replicas):
        layer = {"forward_s": load.forward_s * count, "backward_s": load.backward_s * count, "parameter_bytes": 4}
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
            "emulation": {
                "layers": [layer],
                "update_s": 0.0,
                "before": crossing if stage else None,
                "after": crossing if stage < len(replicas) - 1 else None,
                "minibatches": minibatches,
                "bucket_bytes": 1 << 20,
            },
        }
        (folder / "stages" / f"stage-{stage}.json").write_text(json.dumps(content))


def work(rank: int, world: int, port: int, folder: Path, how: How) -> None:
    """Run as one worker, and write its CPU time to a file."""
    from pipeplan_launch import __main__
    from pipeplan_launch.runtime.training import TrainingEngine

    place(rank, world, port, how)
    run_segment = TrainingEngine.run

    def timed(engine: TrainingEngine, segment: Any) -> int:
        began = time.process_time()
        count = run_segment(engine, segment)
        own = max(1, count // engine.place.replicas)
        (folder / f"cpu-{rank}").write_text(str((time.process_time() - began) / own))
        return count

    TrainingEngine.run = timed  # type: ignore[method-assign]
    with open(os.devnull, "w") as sink:
        sys.stdout = sys.stderr = sink
        options = ["--epochs", "1", "--threads", "1", "--run-dir", str(folder / "run")]
        status = __main__.main([str(folder), *options])
        os._exit(status)

"""What the copies themselves leave of the ideal pace: the transfers and the sleeps of a schedule, and nothing else.

    python tests/benchmarks/bare_transfers.py [--minibatches N]

Straight pipelines run the stream of the executor's own schedule: sleeps, `isend` and `irecv` of torch.distributed over
Gloo on buffers that exist already, receives posted ahead. No model, no autograd, no optimiser, no metrics.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sleeping import How, Load, depths_of, place, start

from pipeplan_launch.plan.schedule import POSTED_RECEIVES, SCHEDULES, ActionKind, StageShape


def pace_s(stages: int, load: Load, minibatches: int) -> float:
    """Seconds between two minibatches of a straight pipeline, at its last stage, without its fill."""
    with tempfile.TemporaryDirectory() as folder:
        start(work, stages, Path(folder), load, minibatches)
        return float((Path(folder) / "pace").read_text())


class Messages:
    """Receives and sends of one worker, by (direction, minibatch)."""

    def __init__(self, floats: int) -> None:
        self._free: list[torch.Tensor] = []
        self._floats = floats
        self._out = torch.zeros(floats)
        self._posted: dict[tuple[int, int], tuple[torch.Tensor, Any]] = {}
        self._sent: dict[int, list[Any]] = defaultdict(list)

    def post(self, direction: int, minibatch: int, peer: int) -> None:
        buffer = self._free.pop() if self._free else torch.zeros(self._floats)
        self._posted[direction, minibatch] = buffer, dist.irecv(buffer, peer, tag=2 * minibatch + direction)

    def take(self, direction: int, minibatch: int) -> None:
        buffer, work = self._posted.pop((direction, minibatch))
        work.wait()
        self._free.append(buffer)

    def send(self, direction: int, minibatch: int, peer: int) -> None:
        self._sent[direction].append(dist.isend(self._out, peer, tag=2 * minibatch + direction))

    def settle(self, keeping: int) -> None:
        for works in self._sent.values():
            while len(works) > keeping:
                works.pop(0).wait()


def work(rank: int, world: int, port: int, folder: Path, load: Load, minibatches: int) -> None:
    """Be one stage."""
    place(rank, world, port, How())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = [StageShape(1, depth) for depth in depths_of([1] * world)]
    messages, done = Messages(load.floats), []
    first, last = rank == 0, rank == world - 1
    for minibatch in range(0 if first else min(POSTED_RECEIVES, minibatches)):
        messages.post(0, minibatch, rank - 1)
    for action in SCHEDULES["1f1b-stashing"].stream(shapes, rank, 0, minibatches):
        if action.kind is ActionKind.FORWARD:
            if not first:
                messages.take(0, action.index)
                if action.index + POSTED_RECEIVES < minibatches:
                    messages.post(0, action.index + POSTED_RECEIVES, rank - 1)
            time.sleep(load.forward_s)
            if not last:
                messages.post(1, action.index, rank + 1)
                messages.send(0, action.index, rank + 1)
        elif action.kind is ActionKind.BACKWARD:
            if not last:
                messages.take(1, action.index)
            time.sleep(load.backward_s)
            if not first:
                messages.send(1, action.index, rank - 1)
            messages.settle(2 * shapes[rank].depth)
            done.append(time.perf_counter())
    messages.settle(0)
    if last:
        counted = done[shapes[0].depth :]
        (folder / "pace").write_text(str((counted[-1] - counted[0]) / (len(counted) - 1)))
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatches", type=int, default=80)
    given = parser.parse_args()
    load = Load(0.020, 0.040, 4_000_000)
    for stages in (2, 4):
        share = (load.forward_s + load.backward_s) / pace_s(stages, load, given.minibatches)
        print(f"{stages} stages, 16 MB across: {share:.3f} of the ideal pace", flush=True)


if __name__ == "__main__":
    main()

"""One worker of a peer: a schedule of torch.distributed.pipelining, or DistributedDataParallel (DDP).

torchrun starts it, as it starts ours. With --updates it runs the contenders that it is told, one after another in the
same processes, each from the same initial weights over the same minibatches, read as ours are. With --goal one
contender trains whole epochs until the mean training loss of one is at most the goal; the clock stands still while
losses and weights are sent around and the test set is evaluated, which only this comparison does. What was measured is
written as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import JOBS, SUBJECTS, accuracy, pieces
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

from pipeplan_launch.job.job import Job
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.runtime.data import Batch, Batches, MinibatchSizes
from pipeplan_launch.telemetry.memory import keep_freed_memory, reset_peak, resident_bytes, resident_memory

SEED = 0


@dataclass(frozen=True)
class Kind:
    """A schedule of torch.distributed.pipelining."""

    make: Callable[..., Any]
    cuts: str
    """Which of a subject's cuts it runs on."""

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages of one of two workers."""
        return {"halves": (rank,), "looped": (rank, rank + 2), "folded": (rank, 3 - rank)}[self.cuts]


KINDS: Mapping[str, Kind] = {
    "gpipe": Kind(pipelining.ScheduleGPipe, "halves"),
    "1f1b": Kind(pipelining.Schedule1F1B, "halves"),
    "interleaved": Kind(pipelining.ScheduleInterleaved1F1B, "looped"),
    "looped-bfs": Kind(pipelining.ScheduleLoopedBFS, "looped"),
    "zero-bubble": Kind(pipelining.ScheduleInterleavedZeroBubble, "looped"),
    "zbv": Kind(pipelining.ScheduleZBVZeroBubble, "folded"),
    "dualpipev": Kind(pipelining.ScheduleDualPipeV, "folded"),
}
"""And `ddp`, which is no schedule."""

Update = Callable[[int], Sequence[float]]
"""Makes one update, by its number; returns the losses that this worker saw, each of as many samples."""


def main() -> None:
    """Run the contenders; the last worker, which has the last stage or the last replica, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subject", required=True)
    parser.add_argument("--contenders", required=True, help="as in 1f1b:4,ddp:1: the number is of microbatches")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--goal", type=float, help="mean training loss of an epoch")
    parser.add_argument("--epochs", type=int, help="at most, with --goal")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--keep-memory", action="store_true", help="set the allocator as our executor does")
    parser.add_argument("--write", type=Path, required=True)
    given = parser.parse_args()
    if given.keep_memory:
        keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if given.goal is None:
        measured = {name: run(given.subject, name, given.updates) for name in given.contenders.split(",")}
    else:
        measured = train(given.subject, given.contenders, given.seed, given.epochs, given.goal)
    if dist.get_rank() == dist.get_world_size() - 1:
        given.write.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def start(subject: str, contender: str, seed: int) -> tuple[Job, Update, list[nn.Parameter]]:
    """The job of a contender, what makes one update, and the parameters of this worker."""
    kind, _, number = contender.partition(":")
    job = load_job(f"{JOBS}:{subject}", seed)
    if kind == "ddp":
        return job, *data_parallel(job, SUBJECTS[subject].batch, seed)
    return job, *pipelined(job, subject, kind, int(number), seed)


def run(subject: str, contender: str, updates: int) -> dict[str, Any]:
    """Updates of one contender: when each ended (seconds), its mean loss, and the memory of every worker (bytes)."""
    _, update, parameters = start(subject, contender, SEED)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the contender before has left counts for nobody
    reset_peak()
    before = resident_bytes() - sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    dist.barrier()
    ends, losses = [], []
    for index in range(updates):
        losses.append(update(index))
        ends.append(time.perf_counter())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (resident_memory().peak_bytes - before, losses))
    seen = [[loss for _, other in everyone for loss in other[index]] for index in range(updates)]
    return {
        "ends": ends,
        "losses": [sum(some) / len(some) for some in seen],
        "memory_bytes": [memory for memory, _ in everyone],
    }


def train(subject: str, contender: str, seed: int, epochs: int, goal: float) -> dict[str, Any]:
    """Seconds, losses and accuracies by epoch, until the goal."""
    kind = contender.partition(":")[0]
    job, update, _ = start(subject, contender, seed)
    updates = len(job.datasets.train) // SUBJECTS[subject].batch  # type: ignore[arg-type]
    seconds: list[float] = []
    losses: list[float] = []
    accuracies: list[float] = []
    while len(seconds) < epochs and (not losses or losses[-1] > goal):
        job.model.train()
        dist.barrier()
        seen: list[float] = []
        begun = time.perf_counter()
        for index in range(updates):
            seen += update(len(seconds) * updates + index)
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        losses.append(mean_of_all(seen))
        if kind in KINDS:
            share_weights(job, subject, kind)
        accuracies.append(accuracy(job))
    return {"seconds": seconds, "loss": losses, "accuracy": accuracies}


def mean_of_all(losses: list[float]) -> float:
    """The mean of the losses that the workers saw, each of as many samples."""
    total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def share_weights(job: Job, subject: str, kind: str) -> None:
    """Give every worker the weights of all stages, so that all of them see the same accuracy."""
    cuts = getattr(SUBJECTS[subject], KINDS[kind].cuts)
    owners = {stage: rank for rank in range(dist.get_world_size()) for stage in KINDS[kind].stages(rank)}
    for stage, module in enumerate(pieces(job.model, cuts)):
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), owners[stage])


def pipelined(job: Job, subject: str, kind: str, microbatches: int, seed: int) -> tuple[Update, list[nn.Parameter]]:
    """An update by a schedule of the peer: the batch in microbatches, a flush, a step."""
    rank, batch = dist.get_rank(), SUBJECTS[subject].batch
    cuts = getattr(SUBJECTS[subject], KINDS[kind].cuts)
    own = {stage: pieces(job.model, cuts)[stage] for stage in KINDS[kind].stages(rank)}
    stages = [
        pipelining.PipelineStage(module, stage, len(cuts) + 1, torch.device("cpu")) for stage, module in own.items()
    ]
    single = issubclass(KINDS[kind].make, pipelining.schedules.PipelineScheduleSingle)
    schedule = KINDS[kind].make(stages[0] if single else stages, microbatches, loss_fn=job.loss)
    parameters = [parameter for module in own.values() for parameter in module.parameters()]
    optimizer = job.make_optimizer(parameters)
    load = loader(job, batch, seed)

    def update(index: int) -> list[float]:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        samples = load(index)
        inputs = samples.inputs if 0 in own else ()
        if len(cuts) in own:
            schedule.step(*inputs, target=samples.target, losses=losses, return_outputs=False)
        else:
            schedule.step(*inputs, return_outputs=False)
        optimizer.step()
        return [loss.item() for loss in losses]

    return update, parameters


def data_parallel(job: Job, batch: int, seed: int) -> tuple[Update, list[nn.Parameter]]:
    """An update by DDP, as its documentation shows it: every worker an equal share of the batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(job.model)
    parameters = list(job.model.parameters())
    optimizer = job.make_optimizer(parameters)
    load = loader(job, batch // world, seed)
    assert job.loss is not None

    def update(index: int) -> list[float]:
        optimizer.zero_grad()
        samples = load(index * world + rank)
        loss = job.loss(model(*samples.inputs), samples.target)
        loss.backward()
        optimizer.step()
        return [loss.item()]

    return update, parameters


def loader(job: Job, minibatch: int, seed: int) -> Callable[[int], Batch]:
    """Reads the minibatches by their numbers, through all epochs, in the order in which our executor reads them."""
    train: Any = job.datasets.train
    sizes = MinibatchSizes(len(train), minibatch, dynamic=True, training=True)
    epochs: dict[int, Batches] = {}

    def load(index: int) -> Batch:
        epoch, number = divmod(index, sizes.count)
        if epoch not in epochs:
            epochs.clear()
            epochs[epoch] = Batches(train, sizes, seed, epoch)
        return epochs[epoch].load(number)

    return load


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

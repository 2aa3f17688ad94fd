"""One worker of a peer: torch.distributed.pipelining, or data parallelism of torch.

torchrun starts it, as it starts ours. It runs the contenders that it is told, one after another in the same processes,
each from the same initial weights over the same minibatches, read as ours are. A contender is a kind and the number of
microbatches of an update, as in 1f1b:4. Kinds are the schedules in `KINDS`, ddp (DistributedDataParallel), ddp-bf16
(gradients in bfloat16), fsdp2 (every child of the model is a unit), and alone (no exchange). What was measured is
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
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jobs import JOBS, SUBJECTS, pieces
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import fully_shard
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

    def stages(self, rank: int, world: int) -> tuple[int, ...]:
        """The stages of one of two workers, or of more with a stage each."""
        if world > 2:
            return (rank,)
        return {"halves": (rank,), "looped": (rank, rank + 2), "folded": (rank, 3 - rank)}[self.cuts]

    def cuts_of(self, subject: str, world: int) -> tuple[str, ...]:
        """The children that begin a stage."""
        cuts: tuple[str, ...] = getattr(SUBJECTS[subject], self.cuts if world == 2 else "looped")
        return cuts


KINDS: Mapping[str, Kind] = {
    "gpipe": Kind(pipelining.ScheduleGPipe, "halves"),
    "1f1b": Kind(pipelining.Schedule1F1B, "halves"),
    "interleaved": Kind(pipelining.ScheduleInterleaved1F1B, "looped"),
    "looped-bfs": Kind(pipelining.ScheduleLoopedBFS, "looped"),
    "zero-bubble": Kind(pipelining.ScheduleInterleavedZeroBubble, "looped"),
    "zbv": Kind(pipelining.ScheduleZBVZeroBubble, "folded"),
    "dualpipev": Kind(pipelining.ScheduleDualPipeV, "folded"),
}

DATA_PARALLEL = ("ddp", "ddp-bf16", "fsdp2", "alone")
Update = Callable[[int], Sequence[float]]
"""Makes one update, by its number; returns the losses that this worker saw, each of as many samples."""


def main() -> None:
    """Run the contenders; the last worker, which has the last stage or the last replica, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subject", required=True)
    parser.add_argument("--contenders", required=True, help="as in 1f1b:4,ddp:1: the number is of microbatches")
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--batch", type=int, help="samples of an update  [default: the subject's]")
    parser.add_argument("--keep-memory", action="store_true", help="set the allocator as our executor does")
    parser.add_argument("--write", type=Path, required=True)
    given = parser.parse_args()
    if given.keep_memory:
        keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch = given.batch or SUBJECTS[given.subject].batch
    measured = {name: run(given.subject, name, batch, given.updates) for name in given.contenders.split(",")}
    if dist.get_rank() == dist.get_world_size() - 1:
        given.write.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def start(subject: str, contender: str, batch: int) -> tuple[Update, list[nn.Parameter]]:
    """What makes one update of a contender, and the parameters of this worker."""
    kind, _, number = contender.partition(":")
    job = load_job(f"{JOBS}:{subject}", SEED)
    if kind in DATA_PARALLEL:
        return data_parallel(job, kind, batch, int(number))
    return pipelined(job, subject, kind, batch, int(number))


def run(subject: str, contender: str, batch: int, updates: int) -> dict[str, Any]:
    """Updates of one contender: when each ended (seconds), its mean loss, and the memory of every worker (bytes)."""
    update, parameters = start(subject, contender, batch)
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


def pipelined(job: Job, subject: str, kind: str, batch: int, microbatches: int) -> tuple[Update, list[nn.Parameter]]:
    """An update by a schedule of the peer: the batch in microbatches, a flush, a step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cuts = KINDS[kind].cuts_of(subject, world)
    own = {stage: pieces(job.model, cuts)[stage] for stage in KINDS[kind].stages(rank, world)}
    stages = [
        pipelining.PipelineStage(module, stage, len(cuts) + 1, torch.device("cpu")) for stage, module in own.items()
    ]
    single = issubclass(KINDS[kind].make, pipelining.schedules.PipelineScheduleSingle)
    schedule = KINDS[kind].make(stages[0] if single else stages, microbatches, loss_fn=job.loss)
    parameters = [parameter for module in own.values() for parameter in module.parameters()]
    optimizer = job.make_optimizer(parameters)
    load = loader(job, batch)

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


def data_parallel(job: Job, kind: str, batch: int, microbatches: int) -> tuple[Update, list[nn.Parameter]]:
    """An update as torch's documentation shows it: every worker an equal share of the batch, in microbatches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = wrapped(job.model, kind)
    parameters = list(model.parameters())
    optimizer = job.make_optimizer(parameters)
    load = loader(job, batch // world // microbatches)
    loss_function = job.loss
    assert loss_function is not None

    def update(index: int) -> list[float]:
        optimizer.zero_grad()
        losses = []
        for number in range(microbatches):
            samples = load((index * microbatches + number) * world + rank)
            last = number + 1 == microbatches
            waiting = nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync()
            with waiting:
                loss = loss_function(model(*samples.inputs), samples.target)
                (loss / microbatches).backward()
            losses.append(loss.item())
        optimizer.step()
        return losses

    return update, parameters


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    """The model as its kind of data parallelism trains it."""
    if kind == "alone":
        return model
    if kind == "fsdp2":
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child)
        return fully_shard(model)
    wrapper = DistributedDataParallel(model)
    if kind == "ddp-bf16":
        # DDP refuses this hook by its name where there is no GPU, and it checks annotations.
        wrapper.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return wrapper


def loader(job: Job, minibatch: int) -> Callable[[int], Batch]:
    """Reads the minibatches by their numbers, through all epochs, in the order in which our executor reads them."""
    train: Any = job.datasets.train
    sizes = MinibatchSizes(len(train), minibatch, dynamic=True, training=True)
    epochs: dict[int, Batches] = {}

    def load(index: int) -> Batch:
        epoch, number = divmod(index, sizes.count)
        if epoch not in epochs:
            epochs.clear()
            epochs[epoch] = Batches(train, sizes, SEED, epoch)
        return epochs[epoch].load(number)

    return load


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

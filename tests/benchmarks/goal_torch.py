"""One worker of a peer that trains until its goal: DDP, or a schedule of torch.distributed.pipelining.

torchrun starts it. It trains whole epochs until the mean training loss of one is at most the goal. The clock stands
still while losses and weights are sent around and the test set is evaluated, which only this comparison does.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers_jobs import SUBJECTS, pieces
from peers_torch import KINDS, data_parallel, pipelined
from torch import nn

from pipeplan_launch.allocator import keep_freed_memory
from pipeplan_launch.job.job import Job
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.runtime.data import Batches, MinibatchSizes


def main() -> None:
    """Train, and let the last worker write seconds and accuracy by epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True, help="file:function; for schedules a subject of peers_jobs.py")
    parser.add_argument("--batch", type=int, required=True, help="samples per update, over all workers")
    parser.add_argument("--contender", required=True, help="as in 1f1b:4 or ddp:1: the number is of microbatches")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True, help="at most")
    parser.add_argument("--goal", type=float, required=True, help="mean training loss of an epoch")
    parser.add_argument("--write", type=Path, required=True)
    given = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kind, _, number = given.contender.partition(":")
    job = load_job(given.job, given.seed)
    subject = given.job.rpartition(":")[2]
    if kind == "ddp":
        update, _ = data_parallel(job, given.batch, given.seed)
    else:
        update, _ = pipelined(job, subject, kind, int(number), given.seed)
    updates = len(job.datasets.train) // given.batch  # type: ignore[arg-type]
    seconds: list[float] = []
    losses: list[float] = []
    accuracies: list[float] = []
    while len(seconds) < given.epochs and (not losses or losses[-1] > given.goal):
        job.model.train()
        dist.barrier()
        seen: list[float] = []
        begun = time.perf_counter()
        for index in range(updates):
            seen += update(len(seconds) * updates + index)
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        losses.append(mean_of_all(seen))
        if kind != "ddp":
            share_weights(job, subject, kind)
        accuracies.append(accuracy(job))
    if dist.get_rank() == dist.get_world_size() - 1:
        given.write.write_text(json.dumps({"seconds": seconds, "loss": losses, "accuracy": accuracies}))
    dist.barrier()
    dist.destroy_process_group()


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


@torch.no_grad()
def accuracy(job: Job) -> float:
    """The share of the test samples that the model gets right."""
    test: Any = job.datasets.test
    model: nn.Module = job.model.eval()
    batch = Batches(test, MinibatchSizes(len(test), len(test), dynamic=True, training=False), 0, 0).load(0)
    output = model(*batch.inputs)
    if job.metric is not None:
        return float(job.metric(output, batch.target)) / len(test)
    return float((output.argmax(dim=1) == batch.target).float().mean())


if __name__ == "__main__":
    main()

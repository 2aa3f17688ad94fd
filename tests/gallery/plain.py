"""A job of the gallery in an ordinary training loop: its pages compare with it, and pipelines that flush must equal it.

    python tests/gallery/plain.py docs/gallery/mnist.py:job EPOCHS [MINIBATCHES]

trains in one process, without stages, on the samples in the executor's order, MINIBATCHES of the job for an update (1).
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from pipeplan_launch.job.job import Job, StageInfo
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.runtime.data import Batches, MinibatchSizes


@dataclass
class Curve:
    """By epoch."""

    loss: list[float] = field(default_factory=list)
    """Mean over the training samples."""
    accuracy: list[float] = field(default_factory=list)
    """On the test samples, after the epoch."""


def plain(ref: str, epochs: int, minibatches: int = 1, seed: int = 0) -> Curve:
    """Train the job, with as many of its minibatches for an update."""
    job = load_job(ref, seed)
    assert job.loss is not None
    assert job.optimizer is not None
    model, train = job.model, job.datasets.train
    whole = StageInfo(named_parameters=tuple(model.named_parameters()))
    optimizer = job.make_optimizer(list(model.parameters()), whole)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    sizes = MinibatchSizes(len(train), job.minibatch * minibatches, dynamic=True, training=True)  # type: ignore[arg-type]
    curve = Curve()
    for epoch in range(epochs):
        batches = Batches(train, sizes, seed, epoch)
        model.train()
        losses = []
        for number in range(sizes.count):
            batch = batches.load(number)
            optimizer.zero_grad()
            loss = job.loss(model(*batch.inputs), batch.target)
            loss.backward()
            if job.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            if scheduler:
                for _ in range(-(-sizes.real_samples(number) // job.minibatch)):
                    scheduler.step()
            losses += [loss.item()] * sizes.real_samples(number)
        curve.loss.append(statistics.fmean(losses))
        curve.accuracy.append(accuracy(job))
    return curve


@torch.no_grad()
def accuracy(job: Job) -> float:
    """The share of the test samples that the model is right about."""
    test: Any = job.datasets.test
    job.model.eval()
    right = 0.0
    for inputs, target in DataLoader(test, 64):
        output = job.model(*inputs) if isinstance(inputs, list) else job.model(inputs)
        found = job.correct(output, target)
        assert found is not None
        right += float(found)
    return right / len(test)


if __name__ == "__main__":
    torch.set_num_threads(1)
    reached = plain(sys.argv[1], *map(int, sys.argv[2:]))
    for number, (loss, right) in enumerate(zip(reached.loss, reached.accuracy, strict=True), 1):
        print(f"epoch {number}  loss {loss:.4f}  test accuracy {right:.2%}")

"""The jobs of run.py, such as `tests/gpu/jobs.py:resnet50_bf16`, and the same jobs in plain PyTorch.

The minibatches of a job are made once, so that reading samples takes no time.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from run import SMALL

from pipeplan.profiler.clock import CPUClock, CUDAClock
from pipeplan_launch import Callback, Data
from pipeplan_launch.job.job import Job, StageInfo, call_model
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.job.pass_conditions import autocast
from pipeplan_launch.runtime.data import Batches, MinibatchSizes

ROOT = Path(__file__).resolve().parents[2]
GPT = f"{ROOT}/docs/gallery/gpt.py:"
MODELS = {
    "resnet50": ("resnet50", 128, 2),
    "gpt2": (f"{GPT}job" if os.environ.get(SMALL) else f"{GPT}gpt2", 8, 4),
    "vgg16": ("vgg16", 64, 1),
    "gnmt8": ("gnmt8", 64, 1),
    "awdlm": ("awd-lm", 80, 1),
    "lstm": (f"{ROOT}/docs/gallery/lstm.py:wide", 64, 2),
    "s2vt": ("s2vt", 80, 1),
    "alexnet": ("alexnet", 256, 2),
    "tiny": ("resnet-tiny", 32, 8),
}
"""By name: the job, and its minibatch on a GPU and in a trial on a CPU."""
TYPES = ("fp32", "bf16")
MINIBATCHES = 24
"""Minibatches of an epoch."""


def build(name: str, dtype: str) -> Job:
    """A job of `MODELS` with prepared minibatches; of type bf16 under autocast."""

    class Memory(Callback):
        """Writes the peaks of the allocator of a one-worker plan into the run folder."""

        def on_start(self, run: Any) -> None:
            self.folder = run.folder

        def on_end(self, summary: dict[str, Any]) -> None:
            cuda = torch.cuda.is_available()
            peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if cuda else [0, 0]
            (self.folder / "peaks.json").write_text(json.dumps(peaks))

    reference, large, small = MODELS[name]
    base = load_job(reference, 0)
    minibatch = small if os.environ.get(SMALL) else large

    @cache
    def prepared(samples: int) -> tuple[Any, Any]:
        batch = base.example_batch(samples)
        inputs = dict(zip(batch.names, batch.inputs, strict=True)) if batch.names else batch.inputs
        return inputs, batch.inputs[0].roll(-1, 1) if batch.target is None else batch.target

    data = Data(
        train=range(minibatch * MINIBATCHES),
        test=range(minibatch),
        collate=lambda samples: prepared(len(samples)),
    )
    return replace(
        base,
        name=f"{name}_{dtype}",
        minibatch=minibatch,
        inputs=None,
        data=lambda: data,
        autocast=torch.bfloat16 if dtype == "bf16" else None,
        callbacks=[Memory()],
    )


for _name in MODELS:
    for _type in TYPES:
        globals()[f"{_name}_{_type}"] = partial(build, _name, _type)


def mnist_bf16() -> Job:
    """The bundled digits under autocast."""
    return replace(load_job("mnist", 0), autocast=torch.bfloat16)


def _optimizer(job: Job) -> torch.optim.Optimizer:
    """The job's optimiser for its whole model."""
    names = tuple(job.model.named_parameters())
    return job.make_optimizer([parameter for _, parameter in names], StageInfo(named_parameters=names))


def plain_losses(reference: str, device: str, minibatches: int) -> list[float]:
    """The losses of the first minibatches of a job, trained by an ordinary loop in this process."""
    torch.set_num_threads(1)  # as the plan's worker has
    job, where = load_job(reference, 0), torch.device(device)
    model = job.model.to(where).train()
    optimizer = _optimizer(job)
    scheduler = job.make_scheduler(optimizer, StageInfo())
    train: Any = job.datasets.train
    batches = Batches(train, MinibatchSizes(len(train), job.minibatch, True, True), 0, 0, job.datasets)
    losses = []
    for number in range(minibatches):
        batch = batches.load(number)
        optimizer.zero_grad()
        with autocast(job.autocast, where):
            loss = job.loss(model(*(one.to(where) for one in batch.inputs)), batch.target.to(where))
        loss.backward()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        if scheduler and job.scheduler_interval == "minibatch":
            scheduler.step()
        losses.append(loss.item())
    return losses


def plain_step(reference: str, device: str) -> tuple[float, float, int]:
    """(seconds of forward and backward, seconds of a whole step, peak bytes) of plain PyTorch; medians of 20 steps."""
    job, where = load_job(reference, 0), torch.device(device)
    model = job.model.to(where).train()
    optimizer = _optimizer(job)
    batch = job.example_batch(job.minibatch)
    inputs, target = [one.to(where) for one in batch.inputs], batch.target.to(where)
    clock: Any = CUDAClock() if device == "cuda" else CPUClock(1)
    torch.set_num_threads(1)

    def passes() -> None:
        with autocast(job.autocast, where):
            loss = job.loss(call_model(model, inputs, batch.names), target)
        loss.backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    taken = [(clock.measure(passes), clock.measure(update)) for _ in range(25 if device == "cuda" else 4)]
    clock.settle()
    both = [(first(), second()) for first, second in taken][5 if device == "cuda" else 1 :]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return statistics.median(a for a, _ in both), statistics.median(a + b for a, b in both), peak

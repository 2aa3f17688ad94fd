"""Train a traced and split model, and beside it the same model as it is, in one plain PyTorch process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from stagewise import backward, forward, programs, random_pipeline
from torch import Tensor, nn

from pipeplan_launch import Job
from pipeplan_launch.tracing.trace import TracedModel, trace_job

torch.set_num_threads(1)
BATCH = 4
STEPS = 3


def job_of(model: nn.Module, inputs: Callable[[int], Tensor] | None = None) -> Job:
    return Job(model, inputs=inputs or (lambda n: torch.randn(n, 4)))


def train_beside_one_process(job: Job, *, seed: int = 0, evaluates: bool = True) -> TracedModel:
    """Trace the job, cut it at random, and train and evaluate it for some steps. Fails where anything differs.

    Compares losses, parameters, all buffers, and what an evaluation after each step gives.
    """
    whole = copy.deepcopy(job.model)
    names = [name for name, _ in whole.named_buffers()]
    traced = trace_job(job, BATCH)
    assert state(whole, names) == state(job.model, names), "tracing changes the model"
    stages = programs(traced, random_pipeline(traced, stages=3, seed=seed))
    optimizers = [torch.optim.SGD(list(one.parameters()), lr=0.1, momentum=0.9) for one in (whole, job.model)]
    for step in range(STEPS):
        torch.manual_seed(step)
        batch = job.example(BATCH)
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(100 + step)
        expected = batch.call(whole.train()).square().mean()
        expected.backward()
        for stage in stages:
            stage.train()
        torch.manual_seed(100 + step)
        output, received, made = forward(stages, list(batch.inputs), BATCH)
        loss = output.square().mean()
        backward(loss, received, made)
        assert torch.equal(loss, expected), step
        for optimizer in optimizers:
            optimizer.step()
        assert state(whole, names) == state(job.model, names), step
        if evaluates:
            assert traced.evaluation_problem is None
            with torch.no_grad():
                expected = batch.call(whole.eval())
                output, _, _ = forward([stage.eval() for stage in stages], list(batch.inputs), BATCH)
            assert torch.equal(output, expected), step
            assert state(whole, names) == state(job.model, names), f"evaluation after step {step}"
    return traced


def state(model: nn.Module, buffers: list[str]) -> dict[str, list]:
    """Parameters and buffers, comparable bit by bit."""
    tensors = {**dict(model.named_parameters()), **{name: model.get_buffer(name) for name in buffers}}
    return {name: tensor.tolist() for name, tensor in tensors.items()}

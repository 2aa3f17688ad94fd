"""Stages run one after the other are the model, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from stagewise import backward, forward, programs, random_pipeline
from torch.utils._pytree import tree_leaves
from traced_zoo import ZOO, build

from pipeplan_launch.trace import trace

torch.set_num_threads(1)
BATCH = 6


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def inputs_of(job, batch):
    torch.manual_seed(7)
    return job.example_inputs(batch)


def target_of(job, batch):
    return torch.arange(batch) % 10 if job.name else None


@pytest.mark.parametrize("name", ZOO)
def test_split_equals_whole(name: str) -> None:
    job = build(name)
    traced = trace(job, BATCH)
    batches = [BATCH, BATCH + 3] if traced.dynamic_batch else [BATCH]
    for seed in range(4):
        pipeline = random_pipeline(traced, stages=2 + seed, seed=seed)
        stages = programs(traced, pipeline)
        for batch in batches:
            check_training(job, stages, batch)
        check_evaluation(job, stages, batches[-1])


def check_training(job, stages, batch):
    whole = copy.deepcopy(job.model).train()
    inputs = inputs_of(job, batch)
    torch.manual_seed(3)
    expected = whole(*copy.deepcopy(inputs))
    expected_loss = job.loss(expected, target_of(job, batch))
    expected_loss.backward()

    job.model.zero_grad()
    for stage in stages:
        stage.train()
    torch.manual_seed(3)
    output, received, made = forward(stages, inputs, batch)
    loss = job.loss(output, target_of(job, batch))
    backward(loss, received, made)

    assert equal(loss, expected_loss)
    assert type(output) is type(expected)
    assert all(equal(a, b) for a, b in zip(tree_leaves(output), tree_leaves(expected), strict=True))
    gradients = {name: one.grad for name, one in job.model.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert equal(gradients[name], parameter.grad), name
    for (name, own), (_, other) in zip(job.model.named_buffers(), whole.named_buffers(), strict=True):
        assert equal(own, other), name


def check_evaluation(job, stages, batch):
    whole = copy.deepcopy(job.model).eval()
    inputs = inputs_of(job, batch)
    with torch.no_grad():
        expected = whole(*copy.deepcopy(inputs))
        for stage in stages:
            stage.eval()
        output, _, _ = forward(stages, inputs, batch)
    assert all(equal(a, b) for a, b in zip(tree_leaves(output), tree_leaves(expected), strict=True))
    for (name, own), (_, other) in zip(job.model.named_buffers(), whole.named_buffers(), strict=True):
        assert equal(own, other), name

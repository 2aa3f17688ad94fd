"""Any cut of the model's DAG, at every place and for every size of the last minibatch."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from extents import slow_but_for
from stagewise import backward, equal, forward, programs, target_of
from torch.utils._pytree import tree_leaves
from traced_zoo import build

from pipeplan_launch import Job
from pipeplan_launch.tracing.trace import TracedModel, trace_job

torch.set_num_threads(1)
BATCH = 6


def every_cut(traced: TracedModel) -> Iterator[list[list[str]]]:
    """The pipelines of two stages that keep the model's order, and together what must be."""
    names = [layer.name for layer in traced.layers]
    for at in range(1, len(names)):
        before = set(names[:at])
        if all(before.issuperset(group) or before.isdisjoint(group) for group in traced.together):
            yield [names[:at], names[at:]]


@pytest.mark.parametrize(
    "name", [*("routes", "regions", "two-towers"), *slow_but_for([], ("unet", "translator", "experts"))]
)
def test_a_smaller_last_minibatch_at_every_cut(name: str) -> None:
    """One sample, or a few: outputs and gradients are those of the whole, shapes are as the receiver expects them."""
    job = build(name)
    traced = trace_job(job, BATCH)
    assert traced.dynamic_batch
    cuts = list(every_cut(traced))
    assert len(cuts) > 2
    for batch in (1, 4):
        expected = _whole(job, batch)
        for pipeline in cuts:
            _check(name, job, programs(traced, pipeline), batch, expected)


def _whole(job: Job, batch: int) -> tuple[torch.Tensor, object, torch.nn.Module]:
    whole = copy.deepcopy(job.model).train()
    torch.manual_seed(3)
    output = whole(*_inputs(job, batch))
    loss = job.loss(output, target_of(job, batch))
    loss.backward()
    return loss, output, whole


def _inputs(job: Job, batch: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(7)
    given = job.example_inputs(batch)
    torch.manual_seed(3)
    return given


def _check(name: str, job: Job, stages: list, batch: int, expected: tuple) -> None:
    job.model.zero_grad()
    output, received, made = forward([stage.train() for stage in stages], _inputs(job, batch), batch)
    loss = job.loss(output, target_of(job, batch))
    backward(loss, received, made)
    assert equal(loss, expected[0])
    assert all(equal(a, b) for a, b in zip(tree_leaves(output), tree_leaves(expected[1]), strict=True))
    gradients = {one: parameter.grad for one, parameter in job.model.named_parameters()}
    for one, parameter in expected[2].named_parameters():
        assert equal(gradients[one], parameter.grad), f"{one} of {name} with stages {[len(s.sends) for s in stages]}"

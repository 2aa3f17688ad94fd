"""Under autocast, stages compute what the whole computes, bit by bit, and what crosses a cut is half as large."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from stagewise import backward, forward, programs, random_pipeline, target_of
from torch import nn
from torch.utils._pytree import tree_leaves
from traced_zoo import build

from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.trace import trace_job

torch.set_num_threads(1)
BATCH = 6
ZOO = ("mnist", "resnet-tiny", "gpt", "translator", "regions", "shared", "two-towers", "routes")


def mixed(name: str) -> Job:
    return replace(build(name), autocast=torch.bfloat16)


def under_autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("gpt", "mnist", "resnet-tiny", "translator", "two-towers")
        else name
        for name in ZOO
    ],
)
def test_split_equals_whole(name: str) -> None:
    """Training, its gradients, and evaluation, for random cuts and another minibatch size."""
    job = mixed(name)
    traced = trace_job(job, BATCH)
    assert any(spec.dtype is torch.bfloat16 for spec in traced.tensors)
    for seed in range(3):
        stages = programs(traced, random_pipeline(traced, stages=2 + seed, seed=seed))
        batch = BATCH + seed if traced.dynamic_batch else BATCH
        torch.manual_seed(7)
        inputs, target = job.example_inputs(batch), target_of(job, batch)
        whole = copy.deepcopy(job.model).train()
        torch.manual_seed(3)
        with under_autocast():
            expected = whole(*copy.deepcopy(inputs))
            expected_loss = job.loss(expected, target)
        expected_loss.backward()

        job.model.zero_grad()
        for stage in stages:
            stage.train()
        torch.manual_seed(3)
        output, received, made = forward(stages, copy.deepcopy(inputs), batch)
        with under_autocast():
            loss = job.loss(output, target)
        backward(loss, received, made)

        assert_same([loss, *tree_leaves(output)], [expected_loss, *tree_leaves(expected)])
        ours, theirs = dict(job.model.named_parameters()), dict(whole.named_parameters())
        assert {one.dtype for one in ours.values()} == {torch.float32}
        held = Counter(id(one) for stage in stages for one in stage.parameters())
        alone = [name for name, one in ours.items() if held[id(one)] == 1]
        assert_same([ours[name].grad for name in alone], [theirs[name].grad for name in alone])
        for name in ours.keys() - set(alone):
            # One process adds the gradients of both uses in bfloat16, stages add theirs in 32 bits.
            torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=2**-7, atol=2**-12)
        assert_same(list(job.model.buffers()), list(whole.buffers()))

        with torch.no_grad(), under_autocast():
            expected = whole.eval()(*copy.deepcopy(inputs))
        with torch.no_grad():
            output, _, _ = forward([stage.eval() for stage in stages], copy.deepcopy(inputs), batch)
        assert_same(tree_leaves(output), tree_leaves(expected))


def assert_same(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_what_crosses_a_cut_is_half_as_large() -> None:
    plain, half = trace_job(build("resnet-tiny"), BATCH), trace_job(mixed("resnet-tiny"), BATCH)
    assert [one.name for one in plain.tensors] == [one.name for one in half.tensors]
    assert all(
        2 * one.bytes(BATCH) == other.bytes(BATCH) for one, other in zip(half.tensors, plain.tensors, strict=True)
    )
    assert half.graph_hash != plain.graph_hash


@pytest.mark.parametrize(
    ("dtype", "says"),
    [(torch.float16, "needs its losses scaled"), (torch.float64, "must be torch.bfloat16"), ("bf16", "not 'bf16'")],
)
def test_other_precisions_are_refused(dtype, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        Job(nn.Linear(2, 2), inputs=lambda n: torch.ones(n, 2), autocast=dtype)

"""Under autocast, stages compute what the whole computes, bit by bit, and what crosses a cut is half as large."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import traced_zoo
import traced_zoo_whole
from extents import slow_but_for
from stagewise import BATCH, check_evaluation, check_training, programs, random_pipeline
from torch import nn

from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.trace import trace_job

ZOO = ("mnist", "resnet-tiny", "gpt", "translator", "regions", "shared", "two-towers", "routes", "routed", "adversary")


def mixed(name: str) -> Job:
    zoo = traced_zoo_whole if name in traced_zoo_whole.ZOO else traced_zoo
    return replace(zoo.build(name), autocast=torch.bfloat16)


@pytest.mark.parametrize("name", slow_but_for(["regions", "shared", "routes", "adversary"], ZOO))
def test_split_equals_whole(name: str) -> None:
    """Training, its gradients, and evaluation, for random cuts and another minibatch size."""
    job = mixed(name)
    traced = trace_job(job, BATCH)
    assert any(spec.dtype is torch.bfloat16 for spec in traced.tensors)
    assert {one.dtype for one in job.model.parameters()} == {torch.float32}
    for seed in range(3):
        stages = programs(traced, random_pipeline(traced, stages=2 + seed, seed=seed))
        check_training(name, job, stages, BATCH + seed if traced.dynamic_batch else BATCH)
        check_evaluation(name, job, stages, BATCH)


def test_what_crosses_a_cut_is_half_as_large() -> None:
    plain, half = trace_job(traced_zoo.build("resnet-tiny"), BATCH), trace_job(mixed("resnet-tiny"), BATCH)
    assert [one.name for one in plain.tensors] == [one.name for one in half.tensors]
    assert all(
        2 * one.bytes(BATCH) == other.bytes(BATCH) for one, other in zip(half.tensors, plain.tensors, strict=True)
    )
    assert half.graph_hash != plain.graph_hash


def test_other_precisions_are_refused() -> None:
    for dtype, says in (
        (torch.float16, "needs its losses scaled"),
        (torch.float64, "must be torch.bfloat16"),
        ("bf16", "not 'bf16'"),
    ):
        with pytest.raises(LaunchError, match=says):
            Job(nn.Linear(2, 2), inputs=lambda n: torch.ones(n, 2), autocast=dtype)

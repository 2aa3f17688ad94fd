"""The FLOPs, tokens and samples that a profile holds, against a count by hand."""

from __future__ import annotations

import torch
from torch import nn

from pipeplan.profile_data.layers import SampleFlops, SampleWork
from pipeplan.profiler.estimate.flops import counted_work
from pipeplan_launch.job.job import Data, Job
from pipeplan_launch.tracing.trace import trace_job


def _job(**options: object) -> Job:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    samples = [(torch.randn(8), torch.tensor(index % 4)) for index in range(12)]
    return Job(model, loss=nn.functional.cross_entropy, data=lambda: Data(samples), **options)  # type: ignore[arg-type]


def test_two_products_forward_and_three_backward() -> None:
    """The first product's input needs no gradient, so that the backward pass has one product less."""
    job = _job(tokens_per_sample=8)
    first, second = 2 * 8 * 16, 2 * 16 * 4
    flops = (SampleFlops("matmul", "float32", first + second, first + 2 * second),)
    assert counted_work(job, trace_job(job, 6, "layer"), 6) == SampleWork(flops, 8, 12)


def test_autocast_counts_in_its_own_type() -> None:
    job = _job(autocast=torch.bfloat16)
    assert {one.arithmetic for one in counted_work(job, trace_job(job, 6, "layer"), 6).flops} == {"bfloat16"}

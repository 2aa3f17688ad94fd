"""What layers take while they run: of allocations in order, and of layers whose needs are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import MemoryUse, measure_workspaces, memory_use
from pipeplan_launch import Job
from pipeplan_launch.job.job import Batch
from pipeplan_launch.tracing.trace import trace_job

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("changes", "use"),
    [([], MemoryUse(0, 0)), ([5, 7, -7, 2], MemoryUse(12, 7)), ([-4, 3], MemoryUse(0, -1)), ([1, -1], MemoryUse(1, 0))],
    ids=str,
)
def test_use_of(changes: list[int], use: MemoryUse) -> None:
    assert memory_use(changes) == use


class Wasteful(nn.Module):
    """A layer that makes three tensors of 1 MiB to give one, and keeps none of them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = x + 1
            b = a + 2
            c = a + b
        return x * 2 + c.sum()


def test_what_is_dropped_on_the_way_counts() -> None:
    model = nn.Sequential(nn.Linear(512, 512), Wasteful(), nn.Linear(512, 1))
    job = Job(model, inputs=lambda n: torch.ones(n, 512))
    run = LayerRun(trace_job(job, 512), Batch(job.example_inputs(512), None), lambda out, target: out.sum(), 512, CPU)
    found = measure_workspaces(run, CPU)
    assert set(found) == {layer.name for layer in run.layers}
    wasteful = max(size for name, size in found.items() if name.startswith("1"))
    assert 2 * MIB - 64 <= wasteful <= 3 * MIB + 64
    # A linear layer needs nothing besides what it makes; backwards it may copy what it transposes.
    assert found["0"] <= MIB

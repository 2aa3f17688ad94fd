"""Memory that there is, what layers take while they run, and what is said of a model that needs more."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.profiler import profiler as module
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import MemoryUse, failed_allocation_bytes, limited_memory, measure_workspaces, memory_use
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model
from pipeplan_launch import Job
from pipeplan_launch.job.job import Batch
from pipeplan_launch.telemetry.memory import free_bytes
from pipeplan_launch.tracing.trace import trace_job


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n"}
TIGHT = {
    "proc/self/cgroup": "0::/outer/inner\n",
    "sys/fs/cgroup/outer/inner/memory.max": "4000000\n",
    "sys/fs/cgroup/outer/inner/memory.current": "1000000\n",
    "sys/fs/cgroup/outer/memory.max": "4000000\n",
    "sys/fs/cgroup/outer/memory.current": "2000000\n",
    "sys/fs/cgroup/outer/memory.stat": "anon 7\ninactive_file 500000\n",
}
"""Version 2: the group's own limit leaves 3 MB, the one around it 2.5 MB with what it cached."""
UNLIMITED = {
    "proc/self/cgroup": "4:cpu:/x\n3:memory:/job\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "max\n",
}


def test_the_tightest_group_with_a_limit_counts(tmp_path: Path) -> None:
    cases = ({}, None), (MACHINE, 5000 * 1024), (MACHINE | TIGHT, 2_500_000), (MACHINE | UNLIMITED, 5000 * 1024)
    for number, (contents, free) in enumerate(cases):
        assert free_bytes(files(tmp_path / str(number), contents)) == free


JOB = """
import torch
from torch import nn
from pipeplan_launch import Job

class Large(nn.Module):
    def forward(self, x):
        return torch.cat([x] * 4096, dim=1).sum(dim=1, keepdim=True)

def inside():
    return Job(nn.Sequential(nn.Linear(64, 256), Large(), nn.Linear(1, 1)), inputs=lambda n: torch.ones(n, 64))

def between():
    layers = [layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return Job(nn.Sequential(*layers), inputs=lambda n: torch.ones(n, 64))
"""


def test_lack_is_found_below_other_errors_and_the_limit_goes_again() -> None:
    outer = InputError("it failed")
    outer.__cause__ = MemoryError()
    assert (failed_allocation_bytes(outer), failed_allocation_bytes(InputError("other"))) == (0, None)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    # More than earlier tests of this process may have left free in the heap, which the limit does not count.
    with limited_memory(64 * MIB), pytest.raises(RuntimeError) as caught:
        torch.ones(8192 * MIB, dtype=torch.uint8)
    assert failed_allocation_bytes(caught.value) == 8192 * MIB
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert torch.ones(256 * MIB, dtype=torch.uint8).nbytes == 256 * MIB


@pytest.mark.parametrize(
    ("name", "microbatch", "says"),
    [
        # 1 MiB of numbers, four thousand times over: 4 GiB inside one layer. Or 40 times 32 MiB.
        ("inside", 1024, r"'.*:inside' at microbatch 1024 does not fit in memory .* more were requested; it needs a"),
        ("between", 1 << 17, r"does not fit in memory: it needs about .* of weights, .* of activations.* are free"),
    ],
)
def test_a_model_that_does_not_fit_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, microbatch: int, says: str
) -> None:
    (tmp_path / "large.py").write_text(JOB)
    monkeypatch.setattr(module, "free_bytes", lambda: 512 * MIB)
    with pytest.raises(InputError, match=says) as caught:
        profile_model(f"{tmp_path}/large.py:{name}", ProfilerOptions(batches=(microbatch,), repeats=1))
    assert "\n" not in str(caught.value)
    assert "try a smaller --microbatch" in str(caught.value)


CPU = torch.device("cpu")
MIB = 1 << 20


def test_use_of() -> None:
    for changes, most, left in (([], 0, 0), ([5, 7, -7, 2], 12, 7), ([-4, 3], 0, -1), ([1, -1], 1, 0)):
        assert memory_use(changes) == MemoryUse(most, left)


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

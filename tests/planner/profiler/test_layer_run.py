"""A model run layer by layer: what it computes, the memory that it takes, and layers that compute the same."""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from pipeplan.errors import InputError
from pipeplan.profiler import profiler as module
from pipeplan.profiler.clock import CPUClock
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import SavedBytes, failed_allocation_bytes, limited_memory, measure_workspaces
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.overhead import measure_overhead, unmeasured
from pipeplan.profiler.prepared_layers import DuplicateFinder, graph_signature
from pipeplan.profiler.profiler import profile_model
from pipeplan_launch import Job, load_job
from pipeplan_launch.job.job import Batch
from pipeplan_launch.telemetry.memory import free_bytes
from pipeplan_launch.tracing.trace import trace_job

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["mnist", "resnet-tiny"])
def test_equals_the_whole(name: str) -> None:
    job = load_job(name, seed=0)
    assert job.loss is not None
    run = LayerRun(trace_job(job, 4), job.example_batch(4), job.loss, 4, CPU)
    whole = copy.deepcopy(job.model)
    expected = job.loss(whole(*run.batch.inputs), run.batch.target)
    expected.backward()

    gradients: dict[str, Tensor] = {}
    for key, parameter in job.model.named_parameters():
        parameter.register_hook(lambda gradient, key=key: gradients.update({key: gradient.clone()}))
    seen: dict[str, list[Tensor]] = {}
    forward = run.forward(unmeasured, look=lambda layer, made: seen.update({layer: list(made)}))
    assert torch.equal(seen["loss"][0], expected)
    backward = run.backward(unmeasured)
    assert list(forward) == list(reversed(backward)) == [layer.name for layer in run.traced.layers]
    for key, parameter in whole.named_parameters():
        assert torch.equal(gradients[key], parameter.grad), key
    overhead = measure_overhead(run, CPUClock(1), CPU, passes=2)
    assert (overhead.forward_s > 0.0, overhead.backward_s > 0.0) == (True, True)


def layer_run(model: nn.Module, width: int, minibatch: int) -> LayerRun:
    """A run over a model that reads so many random numbers a sample, whose loss is the sum of its output."""
    job = Job(model, inputs=lambda n: torch.randn(n, width))
    batch = Batch(job.example_inputs(minibatch), None)
    return LayerRun(trace_job(job, minibatch), batch, lambda output, target: output.sum(), minibatch, CPU)


class Writes(nn.Module):
    """Layers that write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 2
        y[:, 0] = 1.0
        return self.last(y * y.sum())


def test_groups_that_write_in_place() -> None:
    run = layer_run(Writes(), 4, 3)
    assert run.traced.together
    run.forward(unmeasured)
    run.backward(unmeasured)


def saved(model: nn.Module, width: int, minibatch: int) -> dict[str, int]:
    run = layer_run(model, width, minibatch)
    counted = SavedBytes([*model.parameters(), *run.batch.inputs])
    run.forward(unmeasured, counted.watch)
    return dict(counted.by_layer)


class Scales(nn.Module):
    """Multiplication by a number saves nothing, so that the linear after it is charged for its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * 2)


def test_saved_bytes_count_every_storage_once_for_the_first_that_saves() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7), nn.Sigmoid(), nn.Linear(7, 1))
    # The first linear saves the model's input only; ReLU and Sigmoid save what the next linear saves again.
    assert saved(model, width=3, minibatch=10) == {"1": 10 * 5 * 4, "3": 10 * 7 * 4}
    assert saved(Scales(), width=3, minibatch=8) == {"last": 8 * 4 * 4}


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
        for name, text in contents.items():
            (tmp_path / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(number) / name).write_text(text)
        assert free_bytes(tmp_path / str(number)) == free


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


MIB = 1 << 20


class Wasteful(nn.Module):
    """A layer that makes three tensors of 1 MiB to give one, and keeps none of them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = x + 1
            b = a + 2
            c = a + b
        return x * 2 + c.sum()


def test_what_is_dropped_on_the_way_counts() -> None:
    run = layer_run(nn.Sequential(nn.Linear(512, 512), Wasteful(), nn.Linear(512, 1)), 512, 512)
    found = measure_workspaces(run, CPU)
    assert set(found) == {layer.name for layer in run.layers}
    wasteful = max(size for name, size in found.items() if name.startswith("1"))
    assert 2 * MIB - 64 <= wasteful <= 3 * MIB + 64
    # A linear layer needs nothing besides what it makes; backwards it may copy what it transposes.
    assert found["0"] <= MIB


def observed(model: nn.Module, *inputs: Tensor) -> LayerRun:
    """A run over the model with classes found by one full pass."""
    job = Job(model, inputs=lambda n: tuple(one[:1].expand(n, *one.shape[1:]).contiguous() for one in inputs))
    batch = Batch(job.example_inputs(3), None)
    run = LayerRun(trace_job(job, 3), batch, lambda output, target: total(output), 3, CPU)
    run.watcher = observer = DuplicateFinder(run.layers)
    run.forward(unmeasured)
    run.backward(unmeasured)
    run.watcher = None
    run.alike = observer.classes()
    return run


def total(output: Any) -> Tensor:
    return torch.stack([one.sum() for one in torch.utils._pytree.tree_leaves(output)]).sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def test_repeated_blocks_are_measured_once() -> None:
    run = observed(nn.Sequential(nn.Linear(4, 4), *(Block() for _ in range(5)), nn.Linear(4, 2)), torch.randn(1, 4))
    # The last block stands apart where what it makes, or the gradient that it gets, is not what the others do.
    for part in ("norm", "linear", "relu", "add"):
        assert {run.alike.get(f"{block}.{part}") for block in (2, 3, 4)} == {f"1.{part}"}
    assert not {"0", "6", "loss", "1.norm"} & set(run.alike)
    assert run.weights["1.linear"] == 5


def test_what_is_left_out_does_not_run_and_the_rest_computes_on() -> None:
    """The gradients are those of a full pass, in shape and type, for every parameter of a layer that runs."""
    model = nn.Sequential(nn.Linear(4, 4), *(Block() for _ in range(4)))
    run = observed(model, torch.randn(1, 4))
    got: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: got.update({name: gradient}))
    for _ in range(2):
        ran, back = run.forward(unmeasured), run.backward(unmeasured)
        expected = [layer.name for layer in run.layers if layer.name not in run.alike]
        assert list(ran) == list(reversed(back)) == expected
    assert not run._values
    assert not run._shared_outputs
    measured = {name for name, _ in model.named_parameters() if name.startswith(("0", "1"))}
    assert set(got) == measured
    assert all(got[name].shape == model.get_parameter(name).shape for name in measured)


class Two(nn.Module):
    """Two layers side by side, on what `prepare` makes of the input."""

    def __init__(self, a: nn.Module, b: nn.Module, prepare: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.a, self.b, self.prepare = a, b, prepare
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.prepare(x * self.gain)
        return self.a(first).sum() + self.b(second).sum()


def conv(**more: Any) -> nn.Module:
    return nn.Conv2d(2, 2, 3, padding=1, **more)


def half_frozen(module: nn.Module) -> nn.Module:
    module.bias.requires_grad_(False)
    return module


class Scale(nn.Module):
    def __init__(self, by: float | int) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


PAIRS: tuple[tuple[nn.Module, nn.Module, Callable[[Tensor], tuple[Tensor, Tensor]], bool], ...] = (
    (conv(), conv(), lambda x: (x, x), True),
    (conv(), conv(stride=2), lambda x: (x, x), False),
    (conv(), conv(bias=False), lambda x: (x, x), False),
    (conv(), conv(), lambda x: (x, x[:, :, :2]), False),
    (conv(), conv(), lambda x: (x, x.transpose(2, 3) + 0.0), False),
    (conv(), conv(), lambda x: (x, x.detach() + 0.0), False),
    (conv(), conv().requires_grad_(False), lambda x: (x, x), False),
    (conv(), half_frozen(conv()), lambda x: (x, x), False),
    (conv(), conv(dtype=torch.float64), lambda x: (x, x.double()), False),
    (nn.Dropout(0.1), nn.Dropout(0.1), lambda x: (x, x), True),
    (nn.Dropout(0.1), nn.Dropout(0.2), lambda x: (x, x), False),
    (Scale(2.0), Scale(2.0), lambda x: (x, x), True),
    (Scale(2.0), Scale(3.0), lambda x: (x, x), False),
    (Scale(2.0), Scale(2), lambda x: (x, x), False),
    (nn.ReLU(), nn.Tanh(), lambda x: (x, x), False),
)
"""Two modules, what they get of the input, and whether they compute the same."""


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_different_computations_never_share_a_class(number: int) -> None:
    a, b, prepare, same = PAIRS[number]
    run = observed(Two(a, b, prepare), torch.randn(1, 2, 4, 4))
    ours = [layer.name for layer in run.layers if layer.name.startswith(("a", "b"))]
    assert ("b" in run.alike or "b.mul" in run.alike) is same, (ours, run.alike)


class Reads(nn.Module):
    """Three layers that read the same; of what `c` makes two others are made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        c = self.c(x)
        return self.a(x).exp().sum() + self.b(x).exp().sum() + (c.exp() * c.exp().exp()).sum()


class Towers(nn.Module):
    """Rows that integers pick."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Embedding(9, 4) for _ in range(3))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.a(first) + self.b(first) + self.c(second)


def test_who_reads_twice_adds_two_gradients_and_rows_are_the_same_for_the_same_integers() -> None:
    run = observed(Reads(), torch.randn(1, 4))
    assert {run.alike.get("a"), run.alike.get("b")} & {"a", "b"}
    assert "c" not in {*run.alike, *run.alike.values()}
    run = observed(Towers(), torch.tensor([[1, 2]]), torch.tensor([[3, 3]]))
    assert (run.alike.get("b"), "c" in run.alike) == ("a", False)


def test_what_cannot_be_looked_into_is_alike_only_if_it_is_the_same_object() -> None:
    def signature(function: Any) -> object:
        made = fx.Graph()
        made.output(made.call_function(function, (made.placeholder("x"),)))
        return graph_signature(fx.GraphModule({}, made))

    one, other = ((lambda x: x) for _ in range(2))
    assert signature(one) == signature(one) != signature(other)

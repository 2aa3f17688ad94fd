"""Which layers count as the same computation, and what a run that measures one of each kind does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.overhead import unmeasured
from pipeplan.profiler.prepared_layers import DuplicateFinder, graph_signature
from pipeplan_launch import Job
from pipeplan_launch.job.job import Batch
from pipeplan_launch.tracing.trace import trace_job

torch.set_num_threads(1)
CPU = torch.device("cpu")


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

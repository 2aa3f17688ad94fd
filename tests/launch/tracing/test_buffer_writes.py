"""What forward() writes to buffers and parameters is written by the stages too, beside one plain process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from beside_one_process import BATCH, job_of, train_beside_one_process
from stagewise import backward, forward, programs, random_pipeline
from torch import Tensor, nn

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.trace import trace_job


class Part(nn.Module):
    """Two layers, and a buffer of either kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("brief", torch.ones(4), persistent=False)


class Codebook(Part):
    """A codebook with moving averages, which are updated after use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("sizes", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        nearest = torch.cdist(h, self.codes).argmin(dim=1)
        chosen = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hot = nn.functional.one_hot(nearest, 3).float()
                self.sizes.mul_(0.9).add_(hot.sum(dim=0), alpha=0.1)
                self.codes.mul_(0.9).add_(0.1 * (hot.T @ h) / self.sizes[:, None])
        return self.last(h + (chosen - h).detach())


class InPlace(Part):
    """Statistics, and writes by index."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(dim=0), alpha=0.1)
        self.brief[1:3] = h.detach().mean(dim=0)[1:3]
        self.brief.index_add_(0, torch.tensor([0, 0]), h.detach().mean(dim=0)[:2])
        return self.last(h)


class Contrast(Part):
    """A momentum encoder with a queue of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        query = self.first(x)
        with torch.no_grad():
            for own, key in zip(self.first.parameters(), self.key[0].parameters(), strict=True):
                key.data = key.data * 0.9 + own.data * 0.1
            keys = self.key(x)
        likeness = query @ self.queue.clone().detach()
        self.queue = torch.cat([keys.T[:, :2], self.queue[:, :-2]], dim=1)
        return self.last(query * keys) + likeness.sum(dim=1, keepdim=True)


class AssignedAfterUse(Part):
    """The backward pass needs the value from before the assignment."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.brief
        setattr(self, "br" + "ief", 0.9 * self.brief + 0.1 * h.mean(dim=0).detach())
        return self.last(h) * self.brief


class Swapped(Part):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.mean
        self.mean, self.brief = self.brief, h.mean(dim=0).detach()
        return self.last(h)


class Data(Part):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.mean.data = 0.9 * self.mean + 0.1 * h.mean(dim=0).detach()
        self.brief.data[:2] = h.detach().mean(dim=0)[:2]
        self.brief.data.mul_(0.5)
        return self.last(h * self.mean) + self.brief


class Clipped(Part):
    """Weights that are clipped before use and after it: the backward pass sees the clipped ones."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.2, 0.2)
        h = self.last(self.first(x))
        self.last.weight.data.clamp_(-0.1, 0.1)
        return h


class UnreadNorms(Part):
    """Norms whose outputs nothing reads, with gradients and without."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.norms[0](h.detach())
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self.norms[1](h)
        return self.last(h)


class Nested(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before, self.part, self.after = nn.Linear(4, 4), part, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.relu(self.part(self.before(x))))


KINDS = [InPlace, Contrast, AssignedAfterUse, Swapped, Data, Clipped, UnreadNorms]


def test_writes_are_kept_and_in_the_hash() -> None:
    class Without(Part):
        forward = lambda self, x: self.last(self.first(x))  # noqa: E731

    torch.manual_seed(0)
    traced = train_beside_one_process(job_of(nn.Sequential(nn.Linear(4, 4), *(kind() for kind in KINDS))), seed=1)
    assert traced.how == "torch.export"
    without = trace_job(job_of(Without()), BATCH).graph_hash
    for kind in KINDS:
        traced = train_beside_one_process(job_of(kind()))
        assert traced.how == "torch.export"
        assert traced.graph_hash != without


def test_a_codebook_trains() -> None:
    """Its update depends on the mode, so it cannot be evaluated stage by stage, and says so."""
    torch.manual_seed(0)
    traced = train_beside_one_process(job_of(Nested(Codebook())), evaluates=False)
    assert traced.evaluation_problem is not None


class Weighted(Part):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9)
        return self.last(self.first(x) * self.mean)


def test_the_next_minibatch_may_write_before_the_backward_pass() -> None:
    """As in a pipeline, where several minibatches are in flight."""
    for kind in (Weighted, AssignedAfterUse):
        torch.manual_seed(0)
        job = job_of(Nested(kind()))
        inputs = [job.example_inputs(BATCH)[0] for _ in range(2)]
        expected = gradients_of_one_process(job.model, inputs)
        traced = trace_job(job, BATCH)
        stages = programs(traced, random_pipeline(traced, stages=3, seed=1))
        job.model.zero_grad()
        passes = [forward([stage.train() for stage in stages], [x], BATCH) for x in inputs]
        for output, received, made in passes:
            backward(output.square().mean(), received, made)
        for name, parameter in job.model.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name


def gradients_of_one_process(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for x in inputs:
        model(x).square().mean().backward()
    for name, buffer in buffers.items():
        model.get_submodule("part")._buffers[name.removeprefix("part.")] = buffer
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_state_that_forward_writes_is_named() -> None:
    """Recomputation restores it, and plans with several versions of trained weights that are written are refused."""
    traced = trace_job(job_of(Contrast()), BATCH)
    (stage,) = programs(traced, [[layer.name for layer in traced.layers]])
    assert {"key.0.weight", "key.0.bias", "queue", "key.1.running_mean"} <= set(stage.changing_state())
    assert "key.1.weight" not in stage.changing_state(), "it is only read"
    assert traced.written_parameters == ()
    assert trace_job(job_of(Clipped()), BATCH).written_parameters == ("first.weight", "last.weight")


def changes(change: Callable[[Tensor], object]) -> nn.Module:
    class Changes(Part):
        def forward(self, x: Tensor) -> Tensor:
            self.mean = change(self.mean)
            return self.last(self.first(x))

    return Changes()


def test_a_buffer_of_another_kind_is_refused() -> None:
    for change, says in (
        (lambda mean: mean[:2], r"the buffer 'part.mean' and changes it from shape \(4,\) to \(2,\): register"),
        (lambda mean: mean.double(), r"'part.mean' and changes it from torch.float32 to torch.float64: register it"),
        (lambda mean: None, r"'part.mean' and changes it from a tensor to None: register it"),
    ):
        with pytest.raises(LaunchError, match=says):
            trace_job(job_of(Nested(changes(change))), BATCH)

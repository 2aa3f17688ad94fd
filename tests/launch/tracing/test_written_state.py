"""What forward() writes to buffers and parameters is written by the stages too, beside one plain process; attributes
are kept where a later minibatch depends on them, refused, or left alone.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch
from stagewise import BATCH, backward, forward, job_of, programs, random_pipeline, train_beside_one_process
from torch import Tensor, nn

from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.trace import trace_job


class Part(nn.Module):
    """Two layers, and a buffer of either kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("brief", torch.ones(4), persistent=False)


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
        (lambda mean: mean.double(), r"'part.mean' and changes it from torch.float32 to torch.float64: register it"),
        (lambda mean: None, r"'part.mean' and changes it from a tensor to None: register it"),
    ):
        with pytest.raises(LaunchError, match=says):
            trace_job(job_of(Nested(changes(change))), BATCH)


class Kept(nn.Module):
    """A linear layer, and attributes that begin as `begins` says."""

    begins: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, value in copy.deepcopy(self.begins).items():
            setattr(self, name, value)


class Anneals(Kept):
    """A temperature that falls with every step."""

    begins: ClassVar = {"steps": 0}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.linear(x) / (1 + 0.1 * self.steps)


class WarmsUp(Kept):
    """The first steps compute the same, so that only who reads the counter tells that it matters."""

    begins: ClassVar = {"step": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.step = self.step + 1
        return self.linear(x) * 2 if self.step > 3 else self.linear(x)


class Several(Kept):
    begins: ClassVar = {"state": {"steps": 0, "scale": 1.0, "mean": torch.zeros(4), "mode": "soft"}}

    def forward(self, x: Tensor) -> Tensor:
        self.state["steps"] += 1
        self.state["scale"] *= 0.9
        y = self.linear(x) * self.state["scale"] + self.state["mean"]
        self.state["mean"] = y.detach().mean(dim=0)
        return y


class Window(Kept):
    begins: ClassVar = {"recent": collections.deque([0.0, 0.0], maxlen=2)}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * (1 + sum(self.recent))
        self.recent.append(self.recent[-1] + 0.5)
        return y


class Schedule:
    """An object that is no module."""

    def __init__(self) -> None:
        self.rate = 1.0

    def step(self) -> float:
        self.rate *= 0.9
        return self.rate


class Scheduled(Kept):
    begins: ClassVar = {"schedule": Schedule()}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.schedule.step()


class Remembers(Kept):
    """The state of a recurrent layer, as plain tensors, one assigned and one written in place."""

    begins: ClassVar = {"hidden": torch.zeros(4), "mean": torch.zeros(4)}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) + self.hidden) - self.mean
        self.hidden = y.detach().mean(dim=0)
        self.mean.mul_(0.9).add_(y.detach().mean(dim=0), alpha=0.1)
        return y


class CountsFromClass(Kept):
    """The first value is an attribute of the class."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x) / self.steps


class Around(Kept):
    """Reads the counter of its part."""

    begins: ClassVar = {"part": Anneals()}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.part(x)) * (1 + self.part.steps)


def within(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 2))


STATE = [Anneals, CountsFromClass, WarmsUp, Several, Window, Scheduled, Remembers, Around]


def test_state_is_kept() -> None:
    torch.manual_seed(0)
    parts = [kind() for kind in STATE]
    traced = train_beside_one_process(job_of(nn.Sequential(nn.Linear(4, 4), *parts, nn.Linear(4, 2))))
    whole, _, kept = traced.how.partition("; Python state kept in buffers: ")
    assert whole == "torch.export; taken whole: 1, 2, 3, 4, 5, 6, 8"
    assert [name.rpartition(".")[2].removeprefix("state_of_") for name in kept.split(", ")] == [
        *("steps", "steps", "step", "state_0", "state_1", "state_2", "recent_0", "recent_1", "rate", "hidden", "mean"),
        "steps",
    ]
    again = trace_job(Job(traced.model, inputs=lambda n: torch.randn(n, 4)), BATCH)
    assert (again.how, again.graph_hash) == (traced.how, traced.graph_hash)


def test_state_is_in_checkpoints_and_seen_by_recomputation() -> None:
    """Both read the stage's buffers; a counter is one that the replicas take the maximum of, as of a norm's."""
    traced = trace_job(job_of(within(Anneals())), BATCH)
    (stage,) = programs(traced, [[layer.name for layer in traced.layers]])
    assert stage.buffers_by_name()["1.state_of_steps"].dtype == torch.int64
    before = {name: tensor.clone() for name, tensor in stage.changing_state().items()}
    x = torch.randn(BATCH, 4)
    first = stage([], [x], BATCH)
    assert stage.buffers_by_name()["1.state_of_steps"] == 1
    second = stage([], [x], BATCH)
    assert not torch.equal(first, second)
    again = stage.call({**stage.parameters_by_name(), **before}, [], [x], BATCH)
    assert torch.equal(first, again)
    assert stage.buffers_by_name()["1.state_of_steps"] == 2
    assert "1.state_of_steps" not in traced.model.state_dict()


class Grows(Kept):
    begins: ClassVar = {"seen": []}

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(0.5)
        return self.linear(x) * (1 + sum(self.seen))


class FirstMinibatch(Kept):
    """Takes its scale from the first minibatch, as an activation norm does."""

    begins: ClassVar = {"scale": None}

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().std(dim=0)
        return self.linear(x) / self.scale


class OwnGenerator(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.rand(4, generator=self.generator)


class OwnGeneratorOfNumpy(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.source = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.source.random()


def test_other_state_is_refused_and_tensors_of_the_model_itself_are_kept() -> None:
    for model, says in (
        (within(Grows()), r"'seen' of Grows \('1'\) .*, but it grows or changes its structure: keep it in a tensor"),
        (within(FirstMinibatch()), r"'scale' of FirstMinibatch .*, but it holds NoneType and Tensor: keep it in a"),
        (within(OwnGenerator()), r"'generator' of OwnGenerator .*: draw from torch's own generator, which is seeded"),
        (within(OwnGeneratorOfNumpy()), r"'source' of OwnGeneratorOfNumpy .*: draw from torch's own generator"),
    ):
        with pytest.raises(LaunchError, match=says) as caught:
            trace_job(job_of(model), BATCH)
        assert "\n" not in str(caught.value)
    torch.manual_seed(0)
    assert train_beside_one_process(job_of(Remembers())).how.endswith("kept in buffers: hidden, mean")


class Logs(Kept):
    """Counts, keeps what it computed for others to look at, and hands values on within one pass."""

    begins: ClassVar = {"calls": 0, "log": [], "last_attention": None, "shape": None, "total": {"samples": 0}}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total["samples"] += len(x)
        self.shape = x.shape
        self.last_attention = self.linear(x).softmax(dim=1)
        self.log.append(self.last_attention.detach())
        return self.last_attention * self.shape[1]


class Caches(Kept):
    """Makes a mask again for each size, and a table once."""

    begins: ClassVar = {"mask": None, "tables": {}}

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), 1)
        if "cosines" not in self.tables:
            self.tables["cosines"] = torch.arange(4.0).cos()
        if not hasattr(self, "ready"):
            self.ready = True
        return self.linear(x) * self.mask * self.tables["cosines"]


def test_what_no_later_minibatch_depends_on_is_left_alone() -> None:
    torch.manual_seed(0)
    for model in (within(nn.Sequential(Logs(), Caches())), Logs(), Caches()):
        before = copy.deepcopy([vars(module) for module in model.modules()])
        assert train_beside_one_process(job_of(model)).how == "torch.export"
        for module, attributes in zip(model.modules(), before, strict=True):
            assert vars(module).keys() == attributes.keys()
            for name in ("calls", "log", "last_attention", "mask", "tables"):
                assert vars(module).get(name) == attributes.get(name), name


def test_observing_leaves_parameters_and_random_numbers_as_they_are() -> None:
    class Writes(Anneals):
        def forward(self, x: Tensor) -> Tensor:
            self.linear.weight.data.mul_(0.5)
            self.linear.bias.data = self.linear.bias.data + 1
            return super().forward(x)

    model = within(Writes())
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    trace_job(job_of(model), BATCH)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), drawn)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

"""Attributes that forward() changes: kept where a later minibatch depends on them, refused, or left alone."""

from __future__ import annotations

import collections
import copy
from typing import Any, ClassVar

import pytest
import torch
from beside_one_process import BATCH, job_of, train_beside_one_process
from stagewise import programs
from torch import Tensor, nn

from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.trace import trace_job


class Part(nn.Module):
    """A linear layer, and attributes that begin as `begins` says."""

    begins: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, value in copy.deepcopy(self.begins).items():
            setattr(self, name, value)


class Anneals(Part):
    """A temperature that falls with every step."""

    begins: ClassVar = {"steps": 0}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.linear(x) / (1 + 0.1 * self.steps)


class WarmsUp(Part):
    """The first steps compute the same, so that only who reads the counter tells that it matters."""

    begins: ClassVar = {"step": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.step = self.step + 1
        return self.linear(x) * 2 if self.step > 3 else self.linear(x)


class Several(Part):
    begins: ClassVar = {"state": {"steps": 0, "scale": 1.0, "mean": torch.zeros(4), "mode": "soft"}}

    def forward(self, x: Tensor) -> Tensor:
        self.state["steps"] += 1
        self.state["scale"] *= 0.9
        y = self.linear(x) * self.state["scale"] + self.state["mean"]
        self.state["mean"] = y.detach().mean(dim=0)
        return y


class Window(Part):
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


class Scheduled(Part):
    begins: ClassVar = {"schedule": Schedule()}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.schedule.step()


class Remembers(Part):
    """The state of a recurrent layer, as plain tensors, one assigned and one written in place."""

    begins: ClassVar = {"hidden": torch.zeros(4), "mean": torch.zeros(4)}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) + self.hidden) - self.mean
        self.hidden = y.detach().mean(dim=0)
        self.mean.mul_(0.9).add_(y.detach().mean(dim=0), alpha=0.1)
        return y


class CountsFromClass(Part):
    """The first value is an attribute of the class."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x) / self.steps


class Around(Part):
    """Reads the counter of its part."""

    begins: ClassVar = {"part": Anneals()}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.part(x)) * (1 + self.part.steps)


def within(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 2))


KINDS = [Anneals, CountsFromClass, WarmsUp, Several, Window, Scheduled, Remembers, Around]


def test_state_is_kept() -> None:
    torch.manual_seed(0)
    parts = [kind() for kind in KINDS]
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


class Grows(Part):
    begins: ClassVar = {"seen": []}

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(0.5)
        return self.linear(x) * (1 + sum(self.seen))


class FirstMinibatch(Part):
    """Takes its scale from the first minibatch, as an activation norm does."""

    begins: ClassVar = {"scale": None}

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().std(dim=0)
        return self.linear(x) / self.scale


class OwnGenerator(Part):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.rand(4, generator=self.generator)


def test_other_state_is_refused_and_tensors_of_the_model_itself_are_kept() -> None:
    for model, says in (
        (Anneals(), r"the attribute 'steps' of Anneals \(.*test_python_state.py.*self.steps \+= 1\), and .*register_b"),
        (within(Grows()), r"'seen' of Grows \('1'\) .*, but it grows or changes its structure: keep it in a tensor"),
        (within(FirstMinibatch()), r"'scale' of FirstMinibatch .*, but it holds NoneType and Tensor: keep it in a"),
        (within(OwnGenerator()), r"'generator' of OwnGenerator .*: draw from torch's own generator, which is seeded"),
    ):
        with pytest.raises(LaunchError, match=says) as caught:
            trace_job(job_of(model), BATCH)
        assert "\n" not in str(caught.value)
    torch.manual_seed(0)
    assert train_beside_one_process(job_of(Remembers())).how.endswith("kept in buffers: hidden, mean")


class Logs(Part):
    """Counts, keeps what it computed for others to look at, and hands values on within one pass."""

    begins: ClassVar = {"calls": 0, "log": [], "last_attention": None, "shape": None, "total": {"samples": 0}}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total["samples"] += len(x)
        self.shape = x.shape
        self.last_attention = self.linear(x).softmax(dim=1)
        self.log.append(self.last_attention.detach())
        return self.last_attention * self.shape[1]


class Caches(Part):
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

"""What torch.export cannot trace is taken whole, as little of it as can be, and trains as in the whole model."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from stagewise import check_evaluation, check_training, programs, random_pipeline
from torch import nn
from torch.utils.checkpoint import checkpoint
from traced_zoo_whole import ZOO, Router, build

from pipeplan_launch import Data, Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.export_hazards import _unbound
from pipeplan_launch.tracing.split import build_stage_program
from pipeplan_launch.tracing.trace import trace_job

BATCH = 6
HOW = {
    "stochastic-depth": "torch.export; taken whole: blocks.0, blocks.1, blocks.2, blocks.3",
    "routed": "torch.export; taken whole: blocks.0.router, blocks.1.router, blocks.2.router",
    "hooked": "torch.export; taken whole: clips",
    "cache": "torch.export; left out of what it returns: Cache",
}


@pytest.mark.parametrize("name", ZOO)
def test_split_equals_whole(name: str) -> None:
    job = build(name)
    traced = trace_job(job, BATCH)
    assert traced.how == HOW.get(name, "torch.export")
    assert traced.dynamic_batch
    pipelines = [random_pipeline(traced, stages=3, seed=seed) for seed in range(9)]
    stages = programs(traced, max(pipelines, key=len))
    assert len(stages) > 1
    for batch in (BATCH, BATCH + 3):
        check_training(name, job, stages, batch)
    check_evaluation(name, job, stages, BATCH)


def test_the_layer_holds_the_parameters_and_buffers_of_the_module() -> None:
    traced = trace_job(build("routed"), BATCH)
    layer = next(one for one in traced.layers if one.name == "blocks.1.router")
    assert (layer.module, layer.op) == ("blocks.1.router", "Router")
    assert set(layer.parameters) == {f"blocks.1.router.{name}" for name, _ in Router(6).named_parameters()}
    assert layer.buffers == ("blocks.1.router.load",)
    names = [one.name for one in traced.layers]
    at = names.index("blocks.1.router")
    stage = build_stage_program(traced, [names[:at], [*names[at:]]], 1)
    assert "blocks.1.router.load" in stage.changing_state()
    # Called twice, it writes its buffer twice, and so both calls are in one stage.
    assert ("blocks.2.router", "blocks.2.router#2") in traced.together


def test_other_parameters_can_be_given() -> None:
    """Weight versions: the module computes with what it is given, and its own stay as they are."""
    job = build("routed")
    traced = trace_job(job, BATCH)
    (stage,) = programs(traced, [[one.name for one in traced.layers]])
    x, own = job.example_inputs(BATCH), dict(job.model.named_parameters())
    given = {name: one * 0.5 for name, one in stage.parameters_by_name().items()}
    before = {name: one.detach().clone() for name, one in own.items()}
    made = stage.eval().call(given, [], x, BATCH)
    assert all(one is own[name] and torch.equal(one, before[name]) for name, one in job.model.named_parameters())
    halved = copy.deepcopy(job.model).eval()
    halved.load_state_dict({**halved.state_dict(), **given})
    assert torch.equal(made, halved(*x))


def test_tracing_leaves_the_model_and_the_random_numbers_alone() -> None:
    job = build("routed")
    job.model.eval()
    before = {name: one.clone() for name, one in job.model.state_dict().items()}
    apply, hook = torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook
    torch.manual_seed(5)
    trace_job(job, BATCH)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), after)
    assert all(torch.equal(before[name], one) for name, one in job.model.state_dict().items())
    for module in job.model.modules():
        assert not module.training
        assert "forward" not in vars(module)
        assert not module._forward_hooks
    assert (torch.autograd.Function.__dict__["apply"], torch.Tensor.register_hook) == (apply, hook)


class Counts(nn.Linear):
    """Returns a number beside its tensor."""

    def forward(self, x):
        y = super().forward(x)
        return y, int((y > 0).sum())


class Selects(nn.Linear):
    """Returns as many rows as it likes."""

    def forward(self, x):
        y = super().forward(x)
        return y[y.sum(dim=1) > 0]


class Method(nn.Linear):
    """Is used by a method of its own."""

    def twice(self, x):
        return 2 * self(x) if x.sum() > 0 else self(x)


class Holder(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.part = kind(3, 3)

    def forward(self, x):
        if isinstance(self.part, Method):
            return self.part.twice(x)
        made = self.part(x)
        return made[0] * made[1] if isinstance(made, tuple) else x + made.sum(dim=0)


def test_what_cannot_be_one_layer_is_taken_with_what_is_around_it() -> None:
    for kind, says in (
        (Counts, r"its part 'part' cannot be taken whole either: it returns int beside tensors; write it with torch"),
        (Selects, r"'part' cannot be taken whole either: it returns sizes that do not follow from the minibatch size"),
        (Method, r"what it does depends on the data \(.*: return 2 \* self\(x\) if x.sum\(\) > 0 else self\(x\)\)"),
    ):
        torch.manual_seed(0)
        around = nn.Sequential(nn.Linear(3, 3), Holder(kind), nn.Linear(3, 2))
        job = Job(around, inputs=lambda n: torch.randn(n, 3), loss=lambda output, target: output.square().mean())
        traced = trace_job(job, BATCH)
        assert traced.how == "torch.export; taken whole: 1"
        names = [layer.name for layer in traced.layers]
        assert names == ["0", "1", "2", "loss"]
        for at in (1, 2, 3):
            check_training("", job, programs(traced, [names[:at], names[at:]]), 5)
        with pytest.raises(LaunchError, match=says) as caught:
            trace_job(Job(Holder(kind), inputs=lambda n: torch.randn(n, 3)), BATCH)
        assert "\n" not in str(caught.value)


class Grows(nn.Module):
    """Returns another size some time later."""

    more = 0

    def forward(self, x):
        return x.expand(2 + self.more, *x.shape) * x.max().item()


def test_a_module_that_changes_its_mind() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Grows(), nn.Linear(3, 2))
    traced = trace_job(Job(model, inputs=lambda n: torch.randn(n, 3)), BATCH)
    assert traced.how == "torch.export; taken whole: 1"
    (stage,) = programs(traced, [[one.name for one in traced.layers]])
    assert stage([], [torch.randn(4, 3)], 4).shape == (2, 4, 2)
    Grows.more = 1
    with pytest.raises(LaunchError, match=r"'1', which is taken whole, returned 3×4×3 where it returned 2×4×3 when"):
        stage([], [torch.randn(4, 3)], 4)


class Checkpointed(nn.Module):
    """Recomputes a part of itself, by torch's own means; dropout is drawn alike again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.part, self.last = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3)), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x):
        return self.last(checkpoint(self.part, x, use_reentrant=self.reentrant))


def test_checkpoints_keep_their_gradients() -> None:
    for reentrant in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), Checkpointed(reentrant))
        job = Job(model, inputs=lambda n: torch.randn(n, 3), loss=lambda output, target: output.square().mean())
        traced = trace_job(job, BATCH)
        names = [one.name for one in traced.layers]
        assert names == ["0", "1.part.0", "1.part.1", "1.last", "loss"]
        for at in range(1, 5):
            check_training("", job, programs(traced, [names[:at], names[at:]]), BATCH)


def test_a_loss_that_needs_what_no_stage_can_send() -> None:
    samples = [({"left": torch.randn(4), "also": torch.randn(4)}, 0)] * BATCH
    job = replace(build("cache"), loss=lambda output, target: output["cache"].kept[0].sum())
    assert trace_job(job, BATCH).how.endswith("left out of what it returns: Cache"), (
        "without targets nobody asks the loss"
    )
    job = replace(job, data=lambda: Data(samples))
    with pytest.raises(
        LaunchError, match=r"returns an object of class Cache, .* and the loss needs it \(AttributeError"
    ):
        trace_job(job, BATCH)


class Draws(nn.Linear):
    """Adds noise that is not torch's."""

    source = random.random

    def forward(self, x):
        return super().forward(x) * type(self).source()


class DrawsNumpy(Draws):
    source = np.random.rand


def test_random_numbers_of_others_are_drawn_for_every_minibatch() -> None:
    for kind in (Draws, DrawsNumpy):
        model = nn.Sequential(nn.Linear(2, 2), kind(2, 2))
        traced = trace_job(Job(model, inputs=lambda n: torch.randn(n, 2)), BATCH)
        assert traced.how == "torch.export; taken whole: 1"
        (stage,) = programs(traced, [[one.name for one in traced.layers]])
        x = torch.ones(3, 2)
        assert not torch.equal(stage([], [x], 3), stage([], [x], 3))
        with pytest.raises(LaunchError, match=r"Draws.*\.forward\(\) draws random numbers of Python or NumPy"):
            trace_job(Job(kind(2, 2), inputs=lambda n: torch.randn(n, 2)), BATCH)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 10 * gradients[0]


def test_class_methods_of_python_and_of_c_are_called_for_the_class_that_is_given() -> None:
    made = _unbound(dict.__dict__["fromkeys"])(dict, "ab", 1)
    assert made == {"a": 1, "b": 1}
    x = torch.ones(1, requires_grad=True)
    for method in (torch.autograd.Function.__dict__["apply"], torch._C._FunctionBase.__dict__["apply"]):
        x.grad = None
        _unbound(method)(Doubled, x).backward()
        assert x.grad is not None
        assert x.grad.item() == 10

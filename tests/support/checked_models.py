"""Small jobs for the self-check: each keeps state, or computes, in a way of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job
from pipeplan_launch.runtime.self_check import passes
from pipeplan_launch.tracing.split import StageProgram
from pipeplan_launch.tracing.trace import TracedModel

CALLS = [0]


def job(model: nn.Module, **more: Any) -> Job:
    """A job of three classes, on twelve samples."""
    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(12, 4, generator=generator), torch.arange(12) % 3)
    return Job(model, **{"loss": functional.cross_entropy, "data": lambda: Data(samples), "minibatch": 4, **more})


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


class TwoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)


class WritesUnread(TwoLinear):
    """Keeps a mean in a region without gradients, and does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return self.last(y.relu())


class Inside(nn.Module):
    """The same in a submodule, which can be taken whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = WritesUnread(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class CountsSteps(TwoLinear):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.last(self.first(x) / (1 + 0.1 * self.step))


class CountsInside(nn.Module):
    """A counter and a list in a submodule, which is taken whole and keeps them in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.scales = 0, [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.scales[1] *= 0.5
        return x * self.scales[1] / (1 + 0.1 * self.steps)


class CountsCalls(TwoLinear):
    """A number that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.first(x))


class CountsInClass(TwoLinear):
    made = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsInClass.made += 1
        return self.last(self.first(x) / (1 + 0.1 * CountsInClass.made))


class DividesByCalls(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        return x / (1 + 0.1 * CALLS[0])


def counts_in_file() -> nn.Sequential:
    """The layers of `plain`, of which one divides by a counter in a global variable."""
    model = plain()
    model[3] = DividesByCalls()
    return model


class FillsCache(TwoLinear):
    """Computes a list once, and reads it from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is None:
            self.scales = [0.5, 2.0]
        return self.last(self.first(x) * self.scales[0])


class FollowsTheSystem(TwoLinear):
    """Random numbers that no seed decides."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * (1 + int.from_bytes(os.urandom(2), "big")))


def with_hook() -> nn.Sequential:
    model = plain()
    model[2].weight.register_hook(lambda gradient: gradient * 2)
    return model


def reads_weights_in_loss() -> Job:
    model = plain()
    penalty = lambda: sum(weight.square().sum() for weight in model.parameters())  # noqa: E731
    return job(model, loss=lambda output, target: functional.cross_entropy(output, target) + 0.1 * penalty())


def spectral() -> nn.Sequential:
    model = plain()
    model[0] = nn.utils.parametrizations.spectral_norm(model[0])
    return model


def lose_writes(monkeypatch: pytest.MonkeyPatch, buffer: str, module: str) -> None:
    """Have the stages lose what they write to a buffer of a module, unless that module is taken whole."""
    right = passes.build_stage_program

    def built(traced: TracedModel, *arguments: Any) -> StageProgram:
        program = right(traced, *arguments)
        state_of: Any = program._state
        if module not in [layer.name for layer in traced.layers]:
            lost = lambda name, given: state_of(name, given).clone() if name == buffer else state_of(name, given)  # noqa: E731
            vars(program)["_state"] = lost
        return program

    monkeypatch.setattr(passes, "build_stage_program", built)


class WholeNorm(torch.optim.Optimizer):
    """Divides every gradient by the norm of all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in trained]).norm()
        for one in trained:
            one.sub_(0.1 * one.grad / norm)


class Centers(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.seen += 1
        return functional.cross_entropy(output, target) + (output - self.centers[target]).square().mean()


def closes_over_losses() -> Job:
    first, second = Centers(), Centers()
    return job(plain(), loss=lambda output, target: first(output, target) + 0.5 * second(output, target))


def hooked_loss() -> Centers:
    loss = Centers()
    loss.centers.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return loss


class Running:
    """A hook that keeps a moving average in a number."""

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + float(gradient.norm())
        return gradient / (1 + self.mean)


def with_hooks_that_keep() -> nn.Sequential:
    model, times, norms = plain(), 0, []

    def counts(gradient: Tensor) -> Tensor:
        nonlocal times
        times += 1
        norms.append(float(gradient.norm()))
        return gradient / times / len(norms)

    model[0].weight.register_hook(Running())
    model[2].weight.register_hook(counts)
    return model


class StepFails(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("no step")


class Frozen(TwoLinear):
    """A frozen layer, a norm, dropout, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.first.requires_grad_(False)
        self.twice = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.norm(self.first(x)))
        return self.last(self.twice(torch.relu(self.twice(y))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(1, 6, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x.unsqueeze(2))[0][:, -1])


class Named(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"scores": self.last(self.first(left) * right)}


def by_name() -> Job:
    model = Named()
    return Job(
        model,
        inputs=lambda n: {"right": torch.randn(n, 4), "left": torch.randn(n, 4)},
        loss=lambda output, target: output["scores"].square().mean(),
    )


ALIKE: dict[str, Callable[[], Job]] = {
    "plain": lambda: job(plain()),
    "adam": lambda: job(plain(), optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1)),
    "clipped": lambda: job(plain(), clip_norm=0.1, scale_lr="linear"),
    "scheduled": lambda: job(plain(), scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)),
    "frozen": lambda: job(Frozen()),
    "autocast": lambda: job(Frozen(), autocast=torch.bfloat16),
    "recurrent": lambda: job(Recurrent()),
    "by-name": by_name,
    "loss-module": lambda: job(plain(), loss=Centers()),
    "loss-closure": closes_over_losses,
    "hooks": lambda: job(with_hook(), loss=hooked_loss()),
    "hooks-that-keep": lambda: job(with_hooks_that_keep()),
    "counter-inside": lambda: job(nn.Sequential(nn.Linear(4, 4), CountsInside(), nn.Linear(4, 3))),
    "spectral-norm": lambda: job(spectral()),
    "unread-write": lambda: job(WritesUnread()),
    "cache": lambda: job(FillsCache()),
    "no-data": lambda: Job(plain(), inputs=lambda n: torch.randn(n, 4)),
}
"""Jobs that pass, without a remark."""

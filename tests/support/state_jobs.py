"""Jobs with state beside the model's layers, in 64-bit numbers: losses with tensors, hooks, complex weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job

SAMPLES, MINIBATCH, CLASSES = 14, 4, 3


def data() -> Data:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * SAMPLES, 6, dtype=torch.float64, generator=generator)
    targets = torch.randint(CLASSES, (2 * SAMPLES,), generator=generator)
    return Data(TensorDataset(inputs[:SAMPLES], targets[:SAMPLES]), TensorDataset(inputs[SAMPLES:], targets[SAMPLES:]))


def with_momentum(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)


def job(model: nn.Module, loss: Any, **more: Any) -> Job:
    return Job(
        model.double(), **{"loss": loss, "data": data, "optimizer": with_momentum, "minibatch": MINIBATCH, **more}
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Centres(nn.Module):
    """A loss with trained centres, a moving average that is replaced by assignment, and a counter."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(CLASSES, CLASSES, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(CLASSES, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * output.mean(dim=0)
            self.calls += 1
        near = (output - self.centres[target]).square().mean()
        return functional.cross_entropy(output - self.mean, target) + 0.1 * near


def weighted(factor: float, criterion: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    return factor * criterion(output, target)


def module() -> Job:
    return job(Net(), Centres())


def method() -> Job:
    return job(Net(), Centres().forward)


def closure() -> Job:
    first, second = Centres(), Centres()
    return job(Net(), lambda output, target: first(output, target) + 0.5 * second(output, target))


def partial() -> Job:
    return job(Net(), functools.partial(weighted, 2.0, Centres()))


class Plain:
    """A callable object that is no module and holds one in a list."""

    def __init__(self) -> None:
        self.parts = [Centres()]

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.parts[0](output, target)


def plain_object() -> Job:
    return job(Net(), Plain())


LOSSES: dict[str, Callable[[], Job]] = {
    "module": module,
    "method": method,
    "closure": closure,
    "partial": partial,
    "plain_object": plain_object,
}

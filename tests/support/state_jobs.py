"""Jobs with state beside the model's layers, in 64-bit numbers: losses with tensors, hooks, complex weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import SGD, Adam
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


class Waves(nn.Module):
    """Hooks of every kind that runs, a parametrization, and complex weights; a complex tensor goes into `mix`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = weight_norm(nn.Linear(6, 8)), nn.Linear(8, 8)
        self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.mix, self.last = Mix(), nn.Linear(4, CLASSES)
        self.second.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 2,))
        self.second.register_forward_hook(lambda _module, _inputs, output: torch.tanh(output))
        self.second.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.turn.register_hook(lambda gradient: gradient * 2)
        self.last.bias.register_hook(lambda gradient: gradient.sign() * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        turned = torch.complex(h[:, :4], h[:, 4:]) @ self.turn
        return self.last(self.mix(turned))


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))

    def forward(self, turned: Tensor) -> Tensor:
        return (turned @ self.weight).abs()


def bounded(parameters: list[nn.Parameter]) -> SGD:
    """SGD with a hook after its step that keeps the weights small."""

    def bound(optimizer: SGD, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for one in group["params"]:
                    torch.view_as_real(one).clamp_(-0.5, 0.5) if one.is_complex() else one.clamp_(-0.5, 0.5)

    optimizer = with_momentum(parameters)
    optimizer.register_step_post_hook(bound)
    return optimizer


def adam(parameters: list[nn.Parameter]) -> Adam:
    return Adam(parameters, lr=0.01)


def waves() -> Job:
    return job(Waves(), functional.cross_entropy, optimizer=bounded, clip_norm=0.05)


def waves_adam() -> Job:
    return job(Waves(), functional.cross_entropy, optimizer=adam)


def padded_data() -> Data:
    """Targets of which one minibatch of the first epoch, and one of the test data, has none that is valid."""
    made = data()
    for samples, invalid in ((made.train, range(0, SAMPLES, 2)), (made.test, range(MINIBATCH, SAMPLES))):
        samples.tensors[1][list(invalid)] = -100  # type: ignore[union-attr]
    return made


def still(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=0.0)


def padded() -> Job:
    return job(
        Net(),
        functional.cross_entropy,
        data=padded_data,
        optimizer=still,
        minibatch=2,
        loss_weight=lambda target: (target != -100).sum(),
    )


LOSSES: dict[str, Callable[[], Job]] = {
    "module": module,
    "method": method,
    "closure": closure,
    "partial": partial,
    "plain_object": plain_object,
}

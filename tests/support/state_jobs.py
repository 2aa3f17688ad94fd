"""Jobs with state beside the model's layers, in 64-bit numbers: losses with tensors, hooks, complex weights.

The second part has jobs that a pipeline would train differently from one process, or that only look so.
"""

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

SAMPLES, MINIBATCH, CLASSES, IGNORED = 14, 4, 3, -100


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

    def judge(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)


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
        samples.tensors[1][list(invalid)] = IGNORED  # type: ignore[union-attr]
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
        loss_weight=lambda target: (target != IGNORED).sum(),
    )


LOSSES: dict[str, Callable[[], Job]] = {
    "module": module,
    "method": method,
    "closure": closure,
    "partial": partial,
    "plain_object": plain_object,
}


class Listed(Net):
    """Modules and parameters in plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.scales = [nn.Linear(8, 8)], [nn.Parameter(torch.ones(8))]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.parts[0](torch.tanh(self.first(x))) * self.scales[0])


def many() -> Data:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 6, generator=generator)
    return Data(TensorDataset(inputs, torch.randint(CLASSES, (32,), generator=generator)))


def ignored() -> Data:
    inputs, target = many().train.tensors  # type: ignore[attr-defined]
    return Data(TensorDataset(inputs, target.masked_fill(torch.arange(32) % 3 == 0, IGNORED)))


def odd(loss: Any = functional.cross_entropy, model: nn.Module | None = None, **more: Any) -> Job:
    return Job(model or Net(), **{"loss": loss, "data": many, "minibatch": 16, **more})


class Annealed:
    """Counts its calls in an attribute."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return functional.cross_entropy(output, target) / (1 + self.calls)


class Counted(nn.Module):
    """A module whose counter is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return functional.cross_entropy(output, target)


STEPS = 0


def keeps(where: str) -> Job:
    """A loss that keeps something at every call, in one of several places."""
    calls, mean, seen = 0, torch.zeros(CLASSES), list[float]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        global STEPS
        if where == "closure":
            calls += 1
        elif where == "global":
            STEPS += 1
        elif where == "tensor":
            mean.mul_(0.9).add_(output.detach().mean(dim=0), alpha=0.1)
        else:
            seen.append(1.0)
        return functional.cross_entropy(output - mean, target) * 0.9**calls

    return odd(loss)


class Total(nn.Module):
    """A metric that adds up in a buffer."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.total += len(target)
        return self.total


def reads_the_model() -> Job:
    model = Net()
    decay = lambda: sum(one.square().sum() for one in model.parameters())  # noqa: E731
    return odd(lambda output, target: functional.cross_entropy(output, target) + 0.01 * decay(), model)


SCALE = nn.Parameter(torch.ones(CLASSES))


def hides_a_parameter() -> Job:
    """In a global that is looked up by its name."""
    return odd(lambda output, target: functional.cross_entropy(output * globals()["SCA" + "LE"], target))


REFUSED = {
    "an attribute": (lambda: odd(Annealed()), r"the job's loss \(Annealed\) changes 'calls' at every call"),
    "a module": (lambda: odd(Counted()), r"the job's loss \(Counted\) changes 'calls' at every call"),
    "a closure": (
        lambda: keeps("closure"),
        r"changes 'calls' at every call, which no checkpoint holds .*: make it a buffer",
    ),
    "a global": (lambda: keeps("global"), "changes 'STEPS' at every call"),
    "a tensor": (lambda: keeps("tensor"), "changes 'mean' at every call"),
    "a list": (lambda: keeps("list"), "changes 'seen' at every call"),
    "a metric": (lambda: odd(metrics={"all": Total()}), "the job's metric 'all' changes 'total' at every call"),
    "the model": (reads_the_model, "reads the model's parameter '.*', which it would find untrained"),
    "a hidden parameter": (
        hides_a_parameter,
        "reads a parameter of shape .* return what it needs from the model; or put",
    ),
}
"""A job, and what refuses it."""


def cached() -> Job:
    masks: dict[int, Tensor] = {}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if len(output) not in masks:
            masks[len(output)] = torch.ones(len(output), 1)
        return functional.cross_entropy(output * masks[len(output)], target)

    return odd(loss)


def frozen() -> Job:
    teacher = nn.Linear(CLASSES, CLASSES).requires_grad_(False)
    return odd(lambda output, target: functional.mse_loss(teacher(output), output))


def of_the_model() -> Job:
    model = Net()
    return odd(model.judge, model)


SOUND = {
    "plain": odd,
    "a module": lambda: odd(nn.CrossEntropyLoss()),
    "a cache": cached,
    "frozen": frozen,
    "a method of the model": of_the_model,
    "writes to its arguments": lambda: odd(lambda output, target: functional.cross_entropy(output.mul_(2), target)),
    "weights of classes": lambda: odd(
        nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 9.0])),
        loss_weight=lambda target: torch.tensor([1.0, 2.0, 9.0])[target].sum(),
    ),
    "weighted": lambda: odd(data=ignored, loss_weight=lambda target: (target != IGNORED).sum()),
}
"""Jobs about which there is nothing to say."""


def masked(output: Tensor, target: Tensor) -> Tensor:
    valid = target >= 0
    return (functional.cross_entropy(output, target.clamp(min=0), reduction="none") * valid).sum() / valid.sum()


class GlobalNorm(SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([one for group in self.param_groups for one in group["params"]], 0.1)
        return super().step(closure)


class OwnLoss(Net):
    """Returns its loss, as the models of Hugging Face do; the input holds the target."""

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.where(x[:, 0] > 0, 1, IGNORED)
        return functional.cross_entropy(super().forward(x), labels)


NOT_A_MEAN = "the loss is not a mean over the samples"
REMARKED = {
    "ignored targets": (lambda: odd(data=ignored), f"{NOT_A_MEAN}, as targets of -100 are ignored: .* loss_weight"),
    "weights of classes": (
        lambda: odd(nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 9.0]))),
        f"{NOT_A_MEAN}, as classes have weights: ",
    ),
    "a mask": (lambda: odd(masked, data=ignored), NOT_A_MEAN),
    "a sum": (
        lambda: odd(lambda output, target: functional.cross_entropy(output, target, reduction="sum")),
        NOT_A_MEAN,
    ),
    "samples compared": (lambda: odd(lambda output, _: (output @ output.T).softmax(dim=1).diag().mean()), NOT_A_MEAN),
    "the model's own loss": (
        lambda: odd(lambda output, _: output, OwnLoss()),
        f"{NOT_A_MEAN}, as targets of -100 are ignored",
    ),
    "another weight": (
        lambda: odd(data=ignored, loss_weight=len),
        "the loss is not a mean over what loss_weight counts, as targets of -100 are ignored",
    ),
    "a global norm": (
        lambda: odd(optimizer=lambda parameters: GlobalNorm(parameters, lr=0.1)),
        "the optimizer's step on a parameter depends on other parameters",
    ),
    "a metric that fails": (
        lambda: odd(metrics={"top": lambda output, _: output.topk(9).values.mean()}),
        "the job's metric 'top' fails on a minibatch of the training data: RuntimeError: ",
    ),
    "plain lists": (
        lambda: odd(model=Listed()),
        r"never trained \(shapes 8, 8×8, 8\): keep modules in an nn.ModuleList",
    ),
}
"""A job, and what is said about it."""

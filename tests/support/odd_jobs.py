"""Jobs that a pipeline would train differently from one process, or that only look so, each by a function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job

CLASSES, IGNORED = 3, -100


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def judge(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)


class Listed(Net):
    """Modules and parameters in plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.scales = [nn.Linear(8, 8)], [nn.Parameter(torch.ones(8))]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.parts[0](torch.tanh(self.first(x))) * self.scales[0])


def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 6, generator=generator)
    return Data(TensorDataset(inputs, torch.randint(CLASSES, (32,), generator=generator)))


def padded() -> Data:
    inputs, target = data().train.tensors  # type: ignore[attr-defined]
    return Data(TensorDataset(inputs, target.masked_fill(torch.arange(32) % 3 == 0, IGNORED)))


def job(loss: Any = functional.cross_entropy, model: nn.Module | None = None, **more: Any) -> Job:
    return Job(model or Net(), **{"loss": loss, "data": data, "minibatch": 16, **more})


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


def in_a_closure() -> Job:
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return functional.cross_entropy(output, target) * 0.9**calls

    return job(loss)


STEPS = 0


def in_a_global() -> Job:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        global STEPS
        STEPS += 1
        return functional.cross_entropy(output, target)

    return job(loss)


def in_a_tensor() -> Job:
    mean = torch.zeros(CLASSES)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        mean.mul_(0.9).add_(output.detach().mean(dim=0), alpha=0.1)
        return functional.cross_entropy(output - mean, target)

    return job(loss)


def in_a_list() -> Job:
    seen: list[float] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(1.0)
        return functional.cross_entropy(output, target)

    return job(loss)


class Total(nn.Module):
    """A metric that adds up in a buffer."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.total += len(target)
        return self.total


def free_parameter() -> Job:
    scale = nn.Parameter(torch.ones(CLASSES))
    return job(lambda output, target: functional.cross_entropy(output * scale, target))


def reads_the_model() -> Job:
    model = Net()
    decay = lambda: sum(one.square().sum() for one in model.parameters())  # noqa: E731
    return job(lambda output, target: functional.cross_entropy(output, target) + 0.01 * decay(), model)


SCALE = nn.Parameter(torch.ones(CLASSES))


def hides_a_parameter() -> Job:
    """In a global that is looked up by its name."""
    return job(lambda output, target: functional.cross_entropy(output * globals()["SCA" + "LE"], target))


REFUSED = {
    "an attribute": (lambda: job(Annealed()), r"the job's loss \(Annealed\) changes 'calls' at every call"),
    "a module": (lambda: job(Counted()), r"the job's loss \(Counted\) changes 'calls' at every call"),
    "a closure": (in_a_closure, r"changes 'calls' at every call, which no checkpoint holds .*: make it a buffer"),
    "a global": (in_a_global, "changes 'STEPS' at every call"),
    "a tensor": (in_a_tensor, "changes 'mean' at every call"),
    "a list": (in_a_list, "changes 'seen' at every call"),
    "a metric": (lambda: job(metrics={"all": Total()}), "the job's metric 'all' changes 'total' at every call"),
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

    return job(loss)


def frozen() -> Job:
    teacher = nn.Linear(CLASSES, CLASSES).requires_grad_(False)
    return job(lambda output, target: functional.mse_loss(teacher(output), output))


def of_the_model() -> Job:
    model = Net()
    return job(model.judge, model)


SOUND = {
    "plain": job,
    "a module": lambda: job(nn.CrossEntropyLoss()),
    "a cache": cached,
    "frozen": frozen,
    "a method of the model": of_the_model,
    "writes to its arguments": lambda: job(lambda output, target: functional.cross_entropy(output.mul_(2), target)),
    "weights of classes": lambda: job(
        nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 9.0])),
        loss_weight=lambda target: torch.tensor([1.0, 2.0, 9.0])[target].sum(),
    ),
    "weighted": lambda: job(data=padded, loss_weight=lambda target: (target != IGNORED).sum()),
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
    "ignored targets": (lambda: job(data=padded), f"{NOT_A_MEAN}, as targets of -100 are ignored: .* loss_weight"),
    "weights of classes": (
        lambda: job(nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 9.0]))),
        f"{NOT_A_MEAN}, as classes have weights: ",
    ),
    "a mask": (lambda: job(masked, data=padded), NOT_A_MEAN),
    "a sum": (
        lambda: job(lambda output, target: functional.cross_entropy(output, target, reduction="sum")),
        NOT_A_MEAN,
    ),
    "samples compared": (lambda: job(lambda output, _: (output @ output.T).softmax(dim=1).diag().mean()), NOT_A_MEAN),
    "the model's own loss": (
        lambda: job(lambda output, _: output, OwnLoss()),
        f"{NOT_A_MEAN}, as targets of -100 are ignored",
    ),
    "another weight": (
        lambda: job(data=padded, loss_weight=len),
        "the loss is not a mean over what loss_weight counts, as targets of -100 are ignored",
    ),
    "a global norm": (
        lambda: job(optimizer=lambda parameters: GlobalNorm(parameters, lr=0.1)),
        "the optimizer changes a parameter by what the others hold",
    ),
    "a metric that fails": (
        lambda: job(metrics={"top": lambda output, _: output.topk(9).values.mean()}),
        "the job's metric 'top' fails on a minibatch of the training data: RuntimeError: ",
    ),
    "plain lists": (
        lambda: job(model=Listed()),
        r"never trained \(shapes 8, 8×8, 8\): keep modules in an nn.ModuleList",
    ),
}
"""A job, and what is said about it."""

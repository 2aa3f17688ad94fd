"""Models of the comparison of predicted with measured paces, beside those of `peers_jobs`.

`resnet` is a ResNet (He et al., 2015) for images of 32 x 32, with normalisation over the batch and skips: 13 blocks, of
64 to 128 channels; time in convolutions, few weights. `lstm` is a language model of an embedding, four LSTM layers
(Hochreiter and Schmidhuber, 1997) and an output layer: 12.4 M weights. `mlp` is seven linear layers, whose 22 M weights
take as long to update as much of the computing does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job

SAMPLES = 5120
WORDS, TOKENS, WIDTH = 4000, 32, 512
FEATURES = 1792


class Block(nn.Module):
    """Two 3 x 3 convolutions, each normalised, beside a skip."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, channels, side, side) to (samples, width, side / stride, side / stride)."""
        inner = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(inner)) + self.skip(x))


class Recurrent(nn.Module):
    """An LSTM layer whose output is its states alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, TOKENS, WIDTH) to the same."""
        states: Tensor = self.layer(x)[0]
        return states


def resnet() -> Job:
    """The network for images."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    widths = [64] * 6 + [128] * 7
    for before, width in zip([64, *widths[:-1]], widths, strict=True):
        model.append(Block(before, width))
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)])
    data = TensorDataset(torch.randn(SAMPLES, 3, 32, 32), torch.randint(0, 10, (SAMPLES,)))
    return _job(model, data, "resnet", 16)


def lstm() -> Job:
    """The network for text."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Recurrent() for _ in range(4)), nn.Linear(WIDTH, WORDS))
    tokens = torch.randint(0, WORDS, (SAMPLES, TOKENS + 1))
    return _job(model, TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), "lstm", 16)


def mlp() -> Job:
    """The network of linear layers."""
    model = nn.Sequential()
    for _ in range(6):
        model.extend([nn.Linear(FEATURES, FEATURES), nn.ReLU()])
    model.append(nn.Linear(FEATURES, FEATURES))
    data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(0, FEATURES, (SAMPLES,)))
    return _job(model, data, "mlp", 64)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, the mean over everything that is predicted."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What the models are updated with."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _job(model: nn.Module, data: TensorDataset, name: str, minibatch: int) -> Job:
    return Job(model, loss=loss, optimizer=optimizer, data=lambda: Data(data), name=name, minibatch=minibatch)

"""What `learning.py` and `delays.py` train besides the bundled digits: language models, a ResNet, plain momentum.

The text is Python's own documentation of itself, `pydoc_data.topics`; the longer one goes on with modules of its
standard library. Both depend a little on Python's version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

from pipeplan_launch.job.job import Data, Job
from pipeplan_launch.models import mnist
from pipeplan_launch.models.resnet_tiny import Block as ResidualBlock

LENGTH = 48
"""Characters that the model sees at once."""
CHARACTERS, MORE_CHARACTERS = 65_000, 650_000
HELD_OUT = 10
"""One window in so many is for testing."""


class Block(nn.Module):
    """Causal self-attention and two linear layers, each behind a norm and with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, characters, width) in and out."""
        samples, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """A decoder-only transformer over characters."""

    def __init__(self, characters: int, width: int = 64, blocks: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the next character at every place: (samples, characters, vocabulary)."""
        x = self.characters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class SmallLSTM(nn.Module):
    """A language model of two LSTM layers over characters."""

    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.lstm1 = nn.LSTM(width, width, batch_first=True)
        self.lstm2 = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the next character at every place: (samples, characters, vocabulary)."""
        x, _ = self.lstm1(self.characters(text))
        x, _ = self.lstm2(x)
        scores: Tensor = self.head(x)
        return scores


class DigitsResNet(nn.Module):
    """Three residual blocks with BatchNorm, of 8, 16 and 32 channels, for images of 1×8×8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), ResidualBlock(16, 32, 2))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.blocks(functional.relu(self.bn(self.conv(x))))
        scores: Tensor = self.fc(x.mean(dim=(2, 3)))
        return scores


def _small_digits() -> Data:
    """The digits of the bundled `mnist` in their own size of 8×8, with the same split."""
    images, labels = mnist.load_scans()
    images = images.unsqueeze(1) / 16
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(mnist.SPLIT_SEED))
    train, test = order[: mnist.TRAIN_SAMPLES], order[mnist.TRAIN_SAMPLES :]
    return Data(TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]))


def _documentation(characters: int = CHARACTERS) -> tuple[Tensor, int]:
    """(the text as numbers, how many different characters it has)."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    modules = sorted(Path(asyncio.__file__).parent.parent.glob("*.py"))
    for module in modules if len(text) < characters else ():
        text += module.read_text(encoding="utf-8").encode("ascii", "ignore").decode()
    text = text[:characters]
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


def _windows(characters: int = CHARACTERS) -> Data:
    text, _ = _documentation(characters)
    windows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    held_out = torch.arange(len(windows)) % HELD_OUT == 0
    train, test = windows[~held_out], windows[held_out]
    return Data(TensorDataset(train[:, :-1], train[:, 1:]), TensorDataset(test[:, :-1], test[:, 1:]))


def _loss(scores: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def characters_right(scores: Tensor, following: Tensor) -> Any:
    """Samples that are right, each by the share of its characters that are."""
    return (scores.argmax(dim=-1) == following).float().mean(dim=1).sum()


def text() -> Job:
    """The language model."""
    _, characters = _documentation()
    return Job(
        SmallGPT(characters),
        inputs=lambda n: torch.zeros(n, LENGTH, dtype=torch.int64),
        loss=_loss,
        data=_windows,
        optimizer=lambda parameters: AdamW(parameters, lr=2e-3, fused=True),
        metric=characters_right,
        minibatch=8,
    )


def larger() -> Job:
    """A language model of 2.3 M weights and ten times the text."""
    _, characters = _documentation(MORE_CHARACTERS)
    model = SmallGPT(characters, width=192, blocks=5, heads=6)
    return replace(text(), model=model, data=partial(_windows, MORE_CHARACTERS), minibatch=16)


def lstm() -> Job:
    """The language model of LSTM layers."""
    _, characters = _documentation()
    return replace(text(), model=SmallLSTM(characters))


def resnet() -> Job:
    """The digits with a ResNet."""
    return replace(
        mnist.build(), model=DigitsResNet(), inputs=lambda n: torch.rand(n, 1, 8, 8), data=_small_digits, name="resnet"
    )


def _momentum(rate: float, momentum: float) -> Callable[[], Job]:
    def build() -> Job:
        return replace(mnist.build(), optimizer=lambda parameters: SGD(parameters, lr=rate, momentum=momentum))

    return build


low, middle, high = _momentum(0.02, 0.9), _momentum(0.05, 0.9), _momentum(0.1, 0.9)
"""The digits under momentum 0.9."""
low0, middle0, high0 = _momentum(0.2, 0.0), _momentum(0.5, 0.0), _momentum(1.0, 0.0)
"""And without momentum, at rates that step as far."""

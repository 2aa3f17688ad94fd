"""Jobs for the data-parallel engine, with much of what a mean over replicas must cope with. In 64-bit numbers."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import torch
from adapters import AdaptedChain
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job

WORDS, WIDTH, LENGTH = 11, 6, 5
SAMPLES, TEST_SAMPLES, MINIBATCH = 26, 7, 2
"""13 minibatches: the last group of an update is short for 2 and 3 replicas."""


class Block(nn.Module):
    """A repeated block, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.inner(self.norm(x))))


class Tagger(nn.Module):
    """Tied words, repeated blocks, a frozen and an unused parameter, and BatchNorm over the words of a minibatch."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else None
        self.shift = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)
        self.register_buffer("unread", torch.ones(2), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) * self.factor
        for block in self.blocks:
            x = block(x)
        if self.norm is not None:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.shift(x) + x)


class Loss(nn.Module):
    """A loss with a weight to train and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WORDS))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy((output * self.scale).flatten(0, 1), target.flatten())
        if self.training:
            with torch.no_grad():
                self.mean += 0.1 * (loss.detach().nan_to_num() - self.mean)
        return loss


def tagged() -> Data:
    words = torch.randint(WORDS, (SAMPLES + TEST_SAMPLES, LENGTH))
    classes = (words + torch.randint(2, words.shape)) % WORDS
    classes[torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (len(words), 1))] = -100  # padding
    return Data(TensorDataset(words[:SAMPLES], classes[:SAMPLES]), TensorDataset(words[SAMPLES:], classes[SAMPLES:]))


def right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(2) == target).float().mean()


def adamw(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=0.03, weight_decay=0.1)


def job(batch_norm: bool = False, **more: Any) -> Job:
    """A job with AdamW, clipping, a scheduler, a stateful loss and evaluation; `more` replaces its fields."""
    fields: dict[str, Any] = {
        "loss": Loss().double(),
        "optimizer": adamw,
        "scheduler": lambda optimizer: ExponentialLR(optimizer, 0.9),
        "clip_norm": 0.5,
        "metrics": {"right": right},
        "minibatch": MINIBATCH,
    }
    return Job(Tagger(batch_norm).double(), data=tagged, **fields | more)


def plain() -> Job:
    return job()


def valid_targets() -> Job:
    return job(loss_weight=lambda target: (target != -100).sum())


def normalised() -> Job:
    return job(batch_norm=True, scheduler_interval="minibatch")


def hooked() -> Job:
    """A hook on a parameter that sees and changes the mean gradient of an update."""
    made = job(optimizer=lambda parameters: SGD(parameters, lr=0.2))
    made.model.blocks[0].inner.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return made


class Mortal(Tagger):
    """In the first attempts of a launch, one process ends at a call: as `DIES` says, `RANK:CALL` for each attempt."""

    calls = 0

    def forward(self, words: Tensor) -> Tensor:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        dies = os.environ.get("DIES", "").split()
        if attempt < len(dies) and dies[attempt] == f"{os.environ['RANK']}:{self.calls}":
            os._exit(9)
        self.calls += 1
        return super().forward(words)


def mortal() -> Job:
    return dataclasses.replace(job(), model=Mortal(batch_norm=True).double())


SLEEP_S = 0.05


class Slow(Tagger):
    """Process 1 is late with its gradients."""

    def forward(self, words: Tensor) -> Tensor:
        output = super().forward(words)
        if output.requires_grad and os.environ["RANK"] == "1":
            output.register_hook(lambda _: time.sleep(SLEEP_S))
        return output


def unequal_speeds() -> Job:
    return dataclasses.replace(job(), model=Slow(batch_norm=False).double())


def all_used() -> Job:
    """A job all of whose parameters have gradients."""
    made = plain()
    del made.model.unused
    return made


def points() -> Data:
    """Points, and rotations of them."""
    points = torch.randn(24, 8)
    return Data(TensorDataset(points, points.roll(1, dims=1)))


def adapted(eight_bits: bool = False) -> Job:
    """Frozen weights with trained adapters."""
    return Job(
        AdaptedChain(eight_bits=eight_bits),
        loss=functional.mse_loss,
        data=points,
        optimizer=lambda parameters: SGD(parameters, lr=0.1),
        minibatch=MINIBATCH,
    )


def adapted_in_eight_bits() -> Job:
    """The same with frozen weights in 8 bits."""
    return adapted(eight_bits=True)

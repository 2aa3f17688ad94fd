"""The job that the self-test trains: a small network in 64-bit arithmetic, on samples that are always the same."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

from pipeplan_launch.elastic import restart_state
from pipeplan_launch.job.job import Data, Job
from pipeplan_launch.selftest.cases import MINIBATCH, MINIBATCHES

WIDTH, CLASSES, TEST_SAMPLES = 32, 4, 10
KILL_RANK = "PIPEPLAN_SELFTEST_KILL"
"""Environment variable: the rank that kills itself in the first attempt of a launch, when it reads `KILL_SAMPLE`."""
KILL_SAMPLE = MINIBATCH * (MINIBATCHES * 3 // 4)


def build() -> Job:
    """The job. Its samples are used in their order."""
    layers = nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    return Job(
        nn.Sequential(*layers).double(),
        loss=nn.functional.cross_entropy,
        data=_data,
        optimizer=optimizer,
    )


def optimizer(parameters: Any) -> SGD:
    """SGD with momentum."""
    return SGD(parameters, lr=0.1, momentum=0.9)


def _data() -> Data:
    count = MINIBATCH * MINIBATCHES
    generator = torch.Generator().manual_seed(20)
    inputs = torch.randn(count + TEST_SAMPLES, 8, dtype=torch.float64, generator=generator)
    targets = torch.randint(CLASSES, (count + TEST_SAMPLES,), generator=generator)
    return Data(
        _Samples(inputs[:count], targets[:count]),
        TensorDataset(inputs[count:], targets[count:]),
        order=lambda _: range(count),
    )


class _Samples(Dataset[Any]):
    """The training samples. Reading one of them kills the process that is meant to be killed."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._inputs, self._targets = inputs, targets
        self._previous = -1

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        doomed = os.environ.get(KILL_RANK) == os.environ.get("RANK", "")
        in_order, self._previous = index == self._previous + 1, index  # checks before training read single samples
        if doomed and in_order and index == KILL_SAMPLE and restart_state.restart_number() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._inputs[index], self._targets[index]

"""The cases of the self-test, and their reference: training in one process with a copy of every weight version.

The versions follow the table in docs/schedules.md. Nothing here uses the executor's schedules, weight versions,
averaging or messages.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

from pipeplan_launch.elastic import restart_state
from pipeplan_launch.job.job import Data, Job
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.plan.run_options import GLOO

JOB = "pipeplan_measure.selftest_reference:build"
MINIBATCH, MINIBATCHES = 4, 16
"""Samples of a minibatch, and minibatches of an epoch."""
LAYERS = {1: [["0", "1", "2", "3", "4", "loss"]], 2: [["0", "1", "2"], ["3", "4", "loss"]]}
"""Names of the job's layers by stage, for one stage and for two stages."""
ACCUMULATING = ("2bw", "gpipe", "1f1b-flush")
CHECKPOINT_MINIBATCHES = 8


@dataclass(frozen=True)
class Case:
    """A run of the self-test."""

    replicas: tuple[int, ...]
    schedule: str
    transport: str = GLOO
    is_killed: bool = False
    """Whether a worker is killed once. After the restart the run is resumed for another epoch."""

    @property
    def name(self) -> str:
        """The case as text: plan, schedule, and the transport of messages."""
        way = "" if self.transport == GLOO else f", {self.transport}"
        ending = ", a worker killed, then resumed" if self.is_killed else ""
        return f"{'-'.join(map(str, self.replicas))}, {self.schedule}{way}{ending}"

    @property
    def depths(self) -> list[int]:
        """Minibatches in flight on a replica, by stage."""
        depths: list[int] = []
        for count, after in reversed(list(zip(self.replicas, (*self.replicas[1:], 0), strict=True))):
            depths.insert(0, 1 + (-(-depths[0] * after // count) if depths else 0))
        return [-(-self.accumulate // r) for r in self.replicas] if self.schedule == "gpipe" else depths

    @property
    def accumulate(self) -> int:
        """Minibatches per update, for schedules that need this number."""
        return 4 if max(self.replicas) < 3 else 6

    @property
    def epochs(self) -> int:
        """Total number of epochs of the run."""
        return 2 if self.is_killed else 1

    @property
    def segments(self) -> list[int]:
        """Number of minibatches of every segment. A checkpoint in the middle of an epoch ends a segment."""
        parts = MINIBATCHES // CHECKPOINT_MINIBATCHES
        return [CHECKPOINT_MINIBATCHES] * (parts * self.epochs) if self.is_killed else [MINIBATCHES]


# The job that the self-test trains: a small network in 64-bit arithmetic, on samples that are always the same.

WIDTH, CLASSES, TEST_SAMPLES = 32, 4, 10
KILL_RANK = "PIPEPLAN_SELFTEST_KILL"
"""Environment variable: the rank that kills itself in the first attempt of a launch, when it reads `KILL_SAMPLE`."""
KILL_SAMPLE = MINIBATCH * (MINIBATCHES * 3 // 4)


def build() -> Job:
    """The job. Its samples are not shuffled."""
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
    """The training samples. Reading `KILL_SAMPLE` kills the process of rank `KILL_RANK`."""

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


Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Losses:
    """The results of a training run that are compared."""

    minibatches: list[float]
    """The loss of every minibatch, in order."""
    means: list[float]
    """The mean over the minibatches of every epoch, followed by the mean on the test samples after the last epoch."""


class _Stage:
    def __init__(self, model: nn.Sequential, layers: Sequence[str]) -> None:
        self.module = nn.Sequential(*(model[int(name)] for name in layers if name != "loss"))
        self.live = dict(self.module.named_parameters())
        self.optimizer = optimizer(list(self.live.values()))
        self.versions: list[Weights] = []
        self.gradients: list[Weights] = []
        self.begin()

    def begin(self) -> None:
        """Begin a segment: the present weights are version 0."""
        self.versions = [self._copy()]

    def _copy(self) -> Weights:
        return {name: weight.detach().clone() for name, weight in self.live.items()}

    def update(self) -> None:
        for name, weight in self.live.items():
            weight.grad = sum(one[name] for one in self.gradients) / len(self.gradients)  # type: ignore[assignment]
        self.optimizer.step()
        self.gradients = []
        self.versions.append(self._copy())


def reference_losses(case: Case, device: torch.device) -> Losses:
    """The losses that a case should report."""
    job = load_job(JOB, 0)
    model: Any = job.model.to(device)
    stages = [_Stage(model, layers) for layers in LAYERS[len(case.replicas)]]
    assert job.loss is not None
    data, losses = job.datasets, list[float]()
    per_epoch = len(data.train) // MINIBATCH  # type: ignore[arg-type]
    done = 0
    for count in case.segments:
        for stage in stages:
            stage.begin()
        for index in range(count):
            first = (done + index) % per_epoch * MINIBATCH
            losses.append(_minibatch(case, stages, index, *_samples(data.train, first, MINIBATCH, device), job.loss))
            for number, stage in enumerate(stages):
                size = case.accumulate if case.schedule in ACCUMULATING else case.replicas[number]
                if (index + 1) % size == 0 or index + 1 == count:
                    stage.update()
        done += count
    inputs, targets = _samples(data.test, 0, len(data.test), device)  # type: ignore[arg-type]
    with torch.no_grad():
        test_loss = float(job.loss(model(inputs), targets))
    means = [sum(losses[first : first + per_epoch]) / per_epoch for first in range(0, len(losses), per_epoch)]
    return Losses(losses, [*means, test_loss])


def _minibatch(case: Case, stages: Sequence[_Stage], index: int, inputs: Tensor, targets: Tensor, loss: Any) -> float:
    used = []
    for number, stage in enumerate(stages):
        version = stage.versions[_version(case, number, index)]
        weights = {name: weight.clone().requires_grad_() for name, weight in version.items()}
        inputs = functional_call(stage.module, weights, inputs)
        used.append(weights)
    result: Tensor = loss(inputs, targets)
    result.backward()  # type: ignore[no-untyped-call]
    for stage, weights in zip(stages, used, strict=True):
        stage.gradients.append({name: weight.grad for name, weight in weights.items() if weight.grad is not None})
    return result.item()


def _version(case: Case, stage: int, index: int) -> int:
    """Number of updates since the segment began that are included in the weights of a minibatch."""
    late = int(len(case.replicas) > 1 and case.replicas[stage] > 1)
    if case.schedule == "1f1b-stashing":
        return max(0, index // case.replicas[stage] - case.depths[stage] + 1 - late)
    if case.schedule == "vertical-sync":
        late = int(len(case.replicas) > 1 and case.replicas[0] > 1)
        first = max(0, index // case.replicas[0] - case.depths[0] + 1 - late)
        return first * case.replicas[0] // case.replicas[stage]
    return max(0, index // case.accumulate - int(case.schedule == "2bw"))


def _samples(dataset: Any, first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    chosen = [dataset[number] for number in range(first, first + count)]
    inputs, targets = (torch.stack([sample[part] for sample in chosen]).to(device) for part in (0, 1))
    return inputs, targets

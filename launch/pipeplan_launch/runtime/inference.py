"""Forward-only engine: evaluation between epochs, and pipelined inference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeplan_launch.comm.ordered_transport import AnyTransport
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.callbacks import accuracy_text
from pipeplan_launch.job.job import Job
from pipeplan_launch.job.loss import loss_number, loss_text, weight_of
from pipeplan_launch.job.nested_tensors import map_tensors
from pipeplan_launch.job.pass_conditions import autocast, seed_forward
from pipeplan_launch.plan.schedule import SCHEDULES, ActionKind
from pipeplan_launch.runtime.engine import Engine, Segment, StageContext
from pipeplan_launch.telemetry.recorder import Recorder, Stopwatch
from pipeplan_launch.telemetry.run_folder import FORWARD, WAIT

MAX_QUEUED_SENDS = 2
"""Largest number of minibatches whose activations are on the way to the next stage. A faster stage waits."""


@dataclass
class Score:
    """Counts of one replica of the last stage. The sum over the replicas is the result."""

    correct: float = 0.0
    samples: float = 0.0
    judged: float = 0.0
    """Samples whose output a metric could judge."""
    loss_sum: float = 0.0
    """Sum of the loss over the samples, or over what the job's `loss_weight` counts, if the job has a loss."""
    loss_weight: float = 0.0
    """Number of samples in `loss_sum`, or the total of the job's `loss_weight`."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the job's other metrics over the samples."""

    @staticmethod
    def empty(job: Job) -> Score:
        """A score without samples."""
        return Score(sums=dict.fromkeys(job.metrics, 0.0))

    def as_list(self) -> list[float]:
        """The counts as a list, to be summed by an all-reduce."""
        return [self.correct, self.samples, self.judged, self.loss_sum, self.loss_weight, *self.sums.values()]

    def from_sum(self, reduced: Sequence[float]) -> Score:
        """The score of all workers, from the sum of their `as_list`."""
        correct, samples, judged, loss_sum, loss_weight, *sums = reduced
        return Score(correct, samples, judged, loss_sum, loss_weight, dict(zip(self.sums, sums, strict=True)))

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the job's other metrics over the samples."""
        return {name: total / self.samples for name, total in self.sums.items()} if self.samples else {}

    @property
    def accuracy(self) -> float | None:
        """Share of correct outputs, or None if the job has no metric that applies."""
        return self.correct / self.judged if self.judged else None

    def text(self, *, has_loss: bool) -> str:
        """The result for people: the accuracy if a metric applies, otherwise the loss if the job has one."""
        if self.judged:
            return accuracy_text(self.correct, self.judged)
        return (
            f"loss {self.loss_sum / self.samples:.4f}" if has_loss and self.samples else f"{self.samples:.0f} samples"
        )


class ForwardEngine(Engine):
    """Runs the forward-only schedule on one replica of one stage, with the current weights in evaluation mode."""

    def __init__(self, place: StageContext, transport: AnyTransport, recorder: Recorder) -> None:
        super().__init__(place, SCHEDULES["forward-only"], transport, recorder, {ActionKind.FORWARD: self._forward})
        self.score = Score.empty(place.job)

    @contextmanager
    def running(self, segment: Segment) -> Iterator[None]:
        """Context in which the stage's passes of a segment are run. Afterwards `score` holds this worker's counts."""
        self.score = Score.empty(self.place.job)
        self.place.program.eval()
        try:
            with torch.no_grad(), super().running(segment):
                yield
        finally:
            self.place.program.train()

    def _forward(self, index: int) -> None:
        place = self.place
        step, lap = self.begin_step(index), Stopwatch()
        received = self.take_activations(index)
        step.wait_s += lap()
        self.note(WAIT, index, lap, keep_brief=False)
        inputs, target = self.read(index)
        step.load_s += lap()
        seed_forward(place.seed, self.segment.epoch, self.segment.number(index), place.stage)
        result = self.evaluate(index, received, inputs, target)
        step.forward_s += lap()
        self.note(FORWARD, index, lap)
        if not place.is_last:
            self.settle_activations(index - MAX_QUEUED_SENDS * place.replicas)
            self.send_activations(index, result)
        step.send_s += lap()
        self.finish_step(index)

    def evaluate(self, index: int, received: Sequence[Tensor], inputs: Sequence[Tensor], target: Any) -> Any:
        """The stage's output. The last stage also adds to the score."""
        result = self.output(index, received, inputs)
        if self.place.is_last:
            self._judge(index, result, target)
        return result

    def output(self, index: int, received: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """The stage's output for a minibatch."""
        program = self.place.program
        with self.passing("the model's forward", index):
            return program.call(program.parameters_by_name(), received, inputs, self.size(index))

    def _judge(self, index: int, output: object, target: object) -> None:
        real, padded = self.segment.batches.sizes.real_samples(self.segment.number(index)), self.size(index)
        if real < padded:  # padding samples do not count
            output, target = (
                map_tensors(value, lambda tensor: _first(tensor, real, padded)) for value in (output, target)
            )
        job = self.place.job
        self.score.samples += real
        with self.calling("the job's metric", index):
            correct = job.correct(output, target)
            if correct is not None:
                self.score.correct += _one_number(
                    "the job's metric", "how many samples of the minibatch are right", correct, ": sum them"
                )
                self.score.judged += real
        for name, metric in job.metrics.items():
            with self.calling(f"the job's metric {name!r}", index):
                mean = _one_number(f"the job's metric {name!r}", "the mean over the minibatch", metric(output, target))
                self.score.sums[name] += mean * real
        weight = float(real)
        if job.loss_weight is not None:
            with self.calling("the job's loss_weight", index):
                weight = weight_of(job.loss_weight, target)
        if job.loss is not None and weight:
            with self.calling(loss_text(job.loss), index), autocast(job.autocast, self.place.device):
                self.score.loss_sum += loss_number(job.loss, self.place.evaluation_loss(output, target)) * weight
                self.score.loss_weight += weight


def _one_number(what: str, meaning: str, value: object, remedy: str = "") -> float:
    """A metric's value as a number. Raises `LaunchError` for several numbers."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise LaunchError(f"{what} must return one number, {meaning}, not {tuple(value.shape)}{remedy}")
    return float(value)  # type: ignore[arg-type]


def _first(tensor: Tensor, real: int, padded: int) -> Tensor:
    """A tensor without its padding samples, if its first dimension is the minibatch."""
    return tensor[:real] if tensor.ndim and tensor.shape[0] == padded else tensor

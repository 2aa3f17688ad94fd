"""Forward only: evaluation between epochs, and pipelined inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeplan_launch.engine import Engine, Place, Segment, map_tensors
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job import Job
from pipeplan_launch.metrics import Lap, Recorder
from pipeplan_launch.precision import autocast
from pipeplan_launch.schedule import SCHEDULES, Kind
from pipeplan_launch.seeds import seed_forward
from pipeplan_launch.timeline import FORWARD, WAIT
from pipeplan_launch.transport import Transport

KEPT_SENDS = 2  # activations under way to the next stage, per replica: a faster stage waits rather than pile them up


@dataclass
class Score:
    """What the last stage's replicas counted; a sum of these over the replicas is the result."""

    correct: float = 0.0
    samples: float = 0.0
    judged: float = 0.0
    """Samples whose output could be right or wrong: those that a metric was there for."""
    loss_sum: float = 0.0
    """Over the samples, where the job has a loss."""
    sums: dict[str, float] = field(default_factory=dict)
    """Of the job's other metrics, over the samples."""

    @staticmethod
    def empty(job: Job) -> Score:
        """Before anything is counted."""
        return Score(sums=dict.fromkeys(job.metrics, 0.0))

    def as_list(self) -> list[float]:
        """For a reduce."""
        return [self.correct, self.samples, self.judged, self.loss_sum, *self.sums.values()]

    def of_all(self, reduced: Sequence[float]) -> Score:
        """From the sum over all workers of what `as_list` gives."""
        correct, samples, judged, loss_sum, *others = reduced
        return Score(correct, samples, judged, loss_sum, dict(zip(self.sums, others, strict=True)))

    @property
    def metrics(self) -> dict[str, float]:
        """The job's other metrics: means over the samples."""
        return {name: total / self.samples for name, total in self.sums.items()} if self.samples else {}

    @property
    def accuracy(self) -> float | None:
        """Share of right outputs; None where the job has no metric that fits."""
        return self.correct / self.judged if self.judged else None


class ForwardEngine(Engine):
    """Runs the forward-only schedule on one replica of one stage, with the current weights, in evaluation mode."""

    def __init__(self, place: Place, transport: Transport, recorder: Recorder) -> None:
        super().__init__(place, SCHEDULES["forward-only"], transport, recorder, {Kind.FORWARD: self._forward})
        self.score = Score.empty(place.job)

    def run(self, segment: Segment) -> int:
        """Run a segment; `score` then holds what this worker counted."""
        self.score = Score.empty(self.place.job)
        self.place.program.eval()
        try:
            with torch.no_grad():
                return super().run(segment)
        finally:
            self.place.program.train()

    def _forward(self, index: int) -> None:
        place = self.place
        step, lap = self.begin_step(index), Lap()
        received = self.take_activations(index)
        step.wait_s += lap()
        self.note(WAIT, index, lap, even_brief=False)
        inputs, target = self.read(index)
        step.load_s += lap()
        seed_forward(place.seed, self.segment.epoch, self.segment.number(index), place.stage)
        with self.calling("the model's forward", index):
            result = place.program.call(place.program.parameters_by_name(), received, inputs, self.size(index))
        if place.is_last:
            self._judge(index, result, target)
        step.forward_s += lap()
        self.note(FORWARD, index, lap)
        if not place.is_last:
            self.settle_activations(index - KEPT_SENDS * place.replicas)
            self.send_activations(index, result)
        step.send_s += lap()
        self.finish_step(index)

    def _judge(self, index: int, output: object, target: object) -> None:
        real, run = self.segment.batches.sizes.real(self.segment.number(index)), self.size(index)
        if real < run:  # the filling does not count
            output, target = (
                map_tensors(value, lambda tensor: _first(tensor, real, run)) for value in (output, target)
            )
        job = self.place.job
        self.score.samples += real
        with self.calling("the job's metric", index):
            correct = job.correct(output, target)
            if correct is not None:
                self.score.correct += _number(correct)
                self.score.judged += real
        for name, metric in job.metrics.items():
            with self.calling(f"the job's metric {name!r}", index):
                self.score.sums[name] += _mean(name, metric(output, target)) * real
        if job.loss is not None:
            with self.calling("the job's loss", index), autocast(job.autocast, self.place.device):
                self.score.loss_sum += float(job.loss(output, target)) * real


def _number(correct: object) -> float:
    if isinstance(correct, Tensor) and correct.numel() != 1:
        raise LaunchError(
            "the job's metric must return one number, how many samples of the minibatch are right, not "
            f"{tuple(correct.shape)}: sum them"
        )
    return float(correct)  # type: ignore[arg-type]


def _mean(name: str, value: object) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise LaunchError(
            f"the job's metric {name!r} must return one number, the mean over the minibatch, not {tuple(value.shape)}"
        )
    return float(value)  # type: ignore[arg-type]


def _first(tensor: Tensor, real: int, run: int) -> Tensor:
    return tensor[:real] if tensor.ndim and tensor.shape[0] == run else tensor

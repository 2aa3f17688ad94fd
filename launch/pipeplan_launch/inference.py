"""Forward only: evaluation between epochs, and pipelined inference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan_launch.engine import Engine, Place, Segment, map_tensors
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.metrics import Lap, Recorder
from pipeplan_launch.schedule import SCHEDULES, Kind
from pipeplan_launch.seeds import seed_forward
from pipeplan_launch.transport import Direction, Transport

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

    def as_list(self) -> list[float]:
        """For a reduce."""
        return [self.correct, self.samples, self.judged, self.loss_sum]

    @property
    def accuracy(self) -> float | None:
        """Share of right outputs; None where the job has no metric that fits."""
        return self.correct / self.judged if self.judged else None


class ForwardEngine(Engine):
    """Runs the forward-only schedule on one replica of one stage, with the current weights, in evaluation mode."""

    def __init__(self, place: Place, transport: Transport, recorder: Recorder) -> None:
        super().__init__(place, SCHEDULES["forward-only"], transport, recorder, {Kind.FORWARD: self._forward})
        self.score = Score()

    def run(self, segment: Segment) -> None:
        """Run a segment; `score` then holds what this worker counted."""
        self.score = Score()
        self.place.program.eval()
        try:
            with torch.no_grad():
                super().run(segment)
        finally:
            self.place.program.train()

    def _forward(self, minibatch: int) -> None:
        place = self.place
        step, lap = self.recorder.begin(self.segment.epoch, minibatch), Lap()
        sizes = self.segment.batches.sizes
        step.samples = sizes.real(minibatch)
        received = self.take_activations(minibatch)
        step.wait_s += lap()
        inputs, target = self.read(minibatch)
        step.load_s += lap()
        seed_forward(place.seed, self.segment.epoch, minibatch, place.stage)
        with self.calling("the model's forward", minibatch):
            result = place.program.call(place.program.parameters_by_name(), received, inputs, sizes.run(minibatch))
        if place.is_last:
            self._judge(minibatch, result, target)
        step.forward_s += lap()
        if not place.is_last:
            self.transport.settle(Direction.ACTIVATIONS, minibatch - KEPT_SENDS * place.replicas)
            self.send_activations(minibatch, result)
        step.send_s += lap()
        self.finish_step(minibatch)

    def _judge(self, minibatch: int, output: object, target: object) -> None:
        real, run = self.segment.batches.sizes.real(minibatch), self.segment.batches.sizes.run(minibatch)
        if real < run:  # the filling does not count
            output, target = (
                map_tensors(value, lambda tensor: _first(tensor, real, run)) for value in (output, target)
            )
        job = self.place.job
        self.score.samples += real
        with self.calling("the job's metric", minibatch):
            correct = job.correct(output, target)
            if correct is not None:
                self.score.correct += _number(correct)
                self.score.judged += real
        if job.loss is not None:
            with self.calling("the job's loss", minibatch):
                self.score.loss_sum += float(job.loss(output, target)) * real


def _number(correct: object) -> float:
    if isinstance(correct, Tensor) and correct.numel() != 1:
        raise LaunchError(
            "the job's metric must return one number, how many samples of the minibatch are right, not "
            f"{tuple(correct.shape)}: sum them"
        )
    return float(correct)  # type: ignore[arg-type]


def _first(tensor: Tensor, real: int, run: int) -> Tensor:
    return tensor[:real] if tensor.ndim and tensor.shape[0] == run else tensor

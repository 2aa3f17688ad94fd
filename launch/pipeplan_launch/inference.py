"""Forward only: evaluation between epochs, and pipelined inference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan_launch.engine import Engine, Place, Segment, map_tensors
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.metrics import Lap, Recorder
from pipeplan_launch.precision import autocast
from pipeplan_launch.schedule import SCHEDULES, Kind
from pipeplan_launch.seeds import seed_forward
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

    def run(self, segment: Segment) -> int:
        """Run a segment; `score` then holds what this worker counted."""
        self.score = Score()
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
        inputs, target = self.read(index)
        step.load_s += lap()
        seed_forward(place.seed, self.segment.epoch, self.segment.number(index), place.stage)
        with self.calling("the model's forward", index):
            result = place.program.call(place.program.parameters_by_name(), received, inputs, self.size(index))
        if place.is_last:
            self._judge(index, result, target)
        step.forward_s += lap()
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


def _first(tensor: Tensor, real: int, run: int) -> Tensor:
    return tensor[:real] if tensor.ndim and tensor.shape[0] == run else tensor

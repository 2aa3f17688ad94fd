"""Faults that a test can plant in what the user wrote: model, optimiser and metric of the toy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from pipeplan_launch.job.job import Job

Fault = tuple[str, int, int]
"""(what fails: forward, backward, hang, step, metric, vector or load; stage; at which call)."""


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    return output + target.reshape(3, 7)


NAN_FROM = 16
"""The call of the loss `nan-later` from which it is lost."""
_calls = itertools.count(1)


def loss_lost_later(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, which is not finite from some call in this process on."""
    return functional.cross_entropy(output, target) * (float("nan") if next(_calls) >= NAN_FROM else 1.0)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": functional.cross_entropy,
    "broken": broken_loss,
    "nan-later": loss_lost_later,
    "nan": lambda output, target: functional.cross_entropy(output, target) * float("nan"),
    "detached": lambda output, target: functional.cross_entropy(output, target).detach(),
    "each-judged": lambda output, target: functional.cross_entropy(output, target, reduction=_in_training("mean")),
    "each-trained": lambda output, target: functional.cross_entropy(output, target, reduction=_in_training("none")),
}


def _in_training(reduction: str) -> str:
    """This reduction of a loss where gradients are taken, and the other one of `mean` and `none` where they are not."""
    return reduction if torch.is_grad_enabled() else {"mean": "none", "none": "mean"}[reduction]


def bad(*_given: object) -> Tensor:
    raise ValueError("bad")


def vector_metric(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(1) == target


class BadStep(SGD):
    """An optimiser whose step fails."""

    def step(self, _closure: Any = None) -> Any:  # type: ignore[override]
        bad()


def bad_optimizer(parameters: list[nn.Parameter]) -> Optimizer:
    return BadStep(parameters, lr=0.1)


def plant(fault: Fault | None, stage: int, job: Job, program: Any) -> Job:
    """Put the fault into the stage that it is for; returns the job to use."""
    if fault is None or fault[1] != stage:
        return job
    kind, _, at = fault
    if kind == "load":
        bad()
    if kind in ("forward", "backward", "hang"):
        _plant_in_calls(kind, at, program)
    if kind == "step":
        return replace(job, optimizer=bad_optimizer)
    return replace(job, metric={"metric": bad, "vector": vector_metric}.get(kind))


def _plant_in_calls(kind: str, at: int, program: Any) -> None:
    inner, calls = program.call, [0]

    def call(parameters: Mapping[str, Tensor], received: Sequence[Tensor], inputs: Sequence[Tensor], batch: int) -> Any:
        calls[0] += 1
        if calls[0] == at + 1 and kind == "forward":
            bad()
        result = inner(parameters, received, inputs, batch)
        if calls[0] == at + 1 and kind == "hang":
            next(tensor for tensor in result if tensor.requires_grad).register_hook(lambda _: time.sleep(1e6))
        if calls[0] == at + 1 and kind == "backward":
            result.register_hook(bad)
        return result

    program.call = call

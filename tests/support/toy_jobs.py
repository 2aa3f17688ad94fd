"""What a test changes about the toy of `toy_workers`, by name: faults in what the user wrote, optimisers, schedulers,
clipping and callbacks.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import WeightedRandomSampler

from pipeplan_launch import Callback, Data, EpochResult, Job, MinibatchInfo, RunInfo, StageInfo

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


LIMIT = 0.05
"""Of the gradients' norm: the toy's is several times that."""


class Diary(Callback):
    """Writes all that it is told into a file of its process, in the run folder."""

    def on_start(self, run: RunInfo) -> None:
        self._path = run.folder / f"diary-{os.environ['RANK']}.jsonl"
        self._write("start", asdict(run))

    def on_minibatch(self, info: MinibatchInfo) -> None:
        self._write("minibatch", asdict(info))

    def on_epoch(self, result: EpochResult) -> None:
        self._write("epoch", result.as_json())

    def on_checkpoint(self, folder: Path) -> None:
        assert (folder / "manifest.json").is_file()
        self._write("checkpoint", {"folder": folder.name})

    def on_end(self, summary: dict[str, Any]) -> None:
        self._write("end", summary)

    def _write(self, what: str, content: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([what, content], default=str) + "\n")


def diary(run: Path) -> list[tuple[str, dict[str, Any]]]:
    """What the one diary of a run says."""
    (path,) = run.glob("diary-*.jsonl")
    return [(what, content) for what, content in map(json.loads, path.read_text().splitlines())]


class Spoilsport(Callback):
    def on_epoch(self, result: EpochResult) -> None:
        raise OSError("the log's disk is full")


def by_rule(minibatch: int) -> float:
    """A factor that differs for every minibatch."""
    return 1.0 / (1 + minibatch)


def half_of_the_last(parameters: list[Any], stage: StageInfo) -> SGD:
    """Plain SGD; the last stage at half the rate, what is no weight without momentum."""
    assert [one for _, one in stage.named_parameters] == parameters
    rate = 0.1 if stage.stage + 1 == stage.stages else 0.2
    matrices = [one for name, one in stage.named_parameters if name.endswith("weight")]
    others = [one for name, one in stage.named_parameters if not name.endswith("weight")]  # none at some stages
    return SGD([{"params": matrices, "momentum": 0.9}, {"params": others}], lr=rate)


Change = Callable[[Job], Job]


def _scheduled(make: Callable[..., Any], interval: str = "minibatch", **more: Any) -> Change:
    return lambda job: replace(
        job, **{"scheduler": make, "scheduler_interval": interval, "callbacks": [Diary()], **more}
    )


def _reading_ahead(job: Job) -> Job:
    return replace(job, data=lambda: replace(job.datasets, processes=2))


def _weighted(job: Job) -> Job:
    def data() -> Data:
        made = job.datasets
        weights = [1 + index % 3 for index in range(len(made.train))]  # type: ignore[arg-type]
        return replace(made, order=lambda epoch: list(WeightedRandomSampler(weights, 13)))

    return replace(job, data=data, callbacks=[Diary()])


FEATURES: dict[str, Change] = {
    "": lambda job: job,
    "clip": lambda job: replace(job, clip_norm=LIMIT),
    "weighted": _weighted,
    "weighted-ahead": lambda job: _reading_ahead(_weighted(job)),
    "diary": lambda job: replace(job, callbacks=[Diary()]),
    "spoilsport": lambda job: replace(job, callbacks=[Diary(), Spoilsport()]),
    "lambda": _scheduled(lambda optimizer: LambdaLR(optimizer, by_rule)),
    "lambda-scaled": _scheduled(
        lambda optimizer: LambdaLR(optimizer, by_rule), optimizer=half_of_the_last, scale_lr="linear"
    ),
    "sequence": _scheduled(
        lambda optimizer: SequentialLR(
            optimizer, [LambdaLR(optimizer, lambda n: (n + 1) / 8), CosineAnnealingLR(optimizer, 20)], milestones=[7]
        )
    ),
    "plateau": _scheduled(
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.2, factor=0.1), "epoch"
    ),
}
"""What is changed about the toy's job, by name."""

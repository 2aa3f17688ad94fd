"""Optimisers, schedulers, clipping and callbacks for the toy of `toy_workers`, chosen by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import WeightedRandomSampler

from pipeplan_launch import Callback, Data, EpochResult, Job, MinibatchInfo, RunInfo, StageInfo

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


def plain(parameters: list[Any]) -> SGD:
    return SGD(parameters, lr=0.2)


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

"""Runs that train until a goal, of pipeplan's plans and of peers: their curves, times, and the file that keeps them."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import goal_torch
from peers_run import Ground, torchrun


@dataclass(frozen=True)
class Curves:
    """The epochs of a run."""

    seconds: list[float]
    """Seconds of training of each epoch."""
    loss: list[float]
    """Mean training loss of each epoch."""
    accuracy: list[float]
    """Accuracy on the test set after each epoch."""

    def epochs(self, goal: float) -> float | None:
        """Epochs until a loss, between two epochs on the straight line of their losses; None if never."""
        if (last := self._last(goal)) is None:
            return None
        before, now = math.inf if last == 0 else self.loss[last - 1], self.loss[last]
        return 1.0 if last == 0 else last + (before - goal) / (before - now)

    def goal_s(self, goal: float) -> float | None:
        """Seconds of training until a loss; None if never."""
        if (epochs := self.epochs(goal)) is None:
            return None
        whole = math.ceil(epochs) - 1
        return sum(self.seconds[:whole]) + (epochs - whole) * self.seconds[whole]

    def goal_accuracy(self, goal: float) -> float | None:
        """The accuracy after the epoch in which a loss was reached."""
        last = self._last(goal)
        return None if last is None else self.accuracy[last]

    def _last(self, goal: float) -> int | None:
        return next((number for number, one in enumerate(self.loss) if one <= goal), None)


@dataclass(frozen=True)
class Run:
    """One run of a case: a link or a row of a table, and a way to train."""

    case: str
    way: str
    seed: int
    curves: Curves


@dataclass(frozen=True)
class Training:
    """A job that both sides train until a mean training loss of an epoch."""

    job: str
    """The job as `pipeplan profile` takes it: file:function."""
    batch: int
    """Samples per update, over all workers."""
    goal: float
    epochs: int
    """A run has at most so many."""
    workers: int

    def with_torch(self, ground: Ground, contender: str, seed: int, folder: Path) -> Curves:
        """A run of DDP (`ddp:1`) or of a schedule of torch.distributed.pipelining."""
        result = folder / "peer.json"
        options = ["--job", self.job, "--batch", self.batch, "--contender", contender, "--seed", seed]
        options += ["--write", result, "--epochs", self.epochs, "--goal", self.goal]
        ground.run((*torchrun(ground, self.workers), goal_torch.__file__, *map(str, options)))
        found = json.loads(result.read_text())
        return Curves(found["seconds"], found["loss"], found["accuracy"])

    def with_plan(self, ground: Ground, plan: Path, seed: int, options: Sequence[str]) -> Curves:
        """A run of a plan, for all epochs."""
        run_dir = plan.parent / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        every = ["--epochs", self.epochs, "--seed", seed, "--log-every", 0, "--checkpoint-every", self.epochs]
        ground.run(("bash", str(plan / "launch.sh"), *map(str, every), *options, "--run-dir", str(run_dir)))
        epochs = json.loads((run_dir / "summary.json").read_text())["epochs"]
        loss, accuracy = ([float(one[key]) for one in epochs] for key in ("loss", "test_accuracy"))
        return Curves(epoch_seconds(run_dir / "metrics"), loss, accuracy)


def epoch_seconds(metrics: Path) -> list[float]:
    """Seconds of training of each epoch: from the begin of its first minibatch to the end of its last one.

    A line of the metrics has the time at which it was written, and how long the parts of its minibatch took.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    parts = ("load_s", "wait_s", "forward_s", "backward_s", "sync_s", "update_s", "send_s")
    for path in metrics.glob("rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            begun = line["time_s"] - sum(line[part] for part in parts)
            begins[line["epoch"]] = min(begun, begins.get(line["epoch"], begun))
            ends[line["epoch"]] = max(line["time_s"], ends.get(line["epoch"], 0.0))
    return [ends[epoch] - begins[epoch] for epoch in sorted(ends)]


class Results:
    """The runs in a file, a JSON object a line, to which new ones are added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        self.runs = [Run(one["case"], one["way"], one["seed"], Curves(**one["curves"])) for one in found]

    def has(self, case: str, way: str, seed: int) -> bool:
        """Whether the file has a run."""
        return any((run.case, run.way, run.seed) == (case, way, seed) for run in self.runs)

    def of(self, case: str, way: str) -> list[Curves]:
        """The curves of all seeds."""
        return [run.curves for run in self.runs if (run.case, run.way) == (case, way)]

    def add(self, run: Run) -> None:
        """Add a run to the file."""
        self.runs.append(run)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    if not values:
        return "–"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):{form}} ± {deviation:{form}}"

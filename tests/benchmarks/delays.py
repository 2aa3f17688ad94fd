"""What stale gradients cost in epochs, by schedule, correction, optimiser and rate, in one process that keeps versions.

    python tests/benchmarks/delays.py FILE [digits] [text] [resnet] [lstm] [larger] [--seeds 5] [--optimizers adamw,sgd]

The process applies each schedule's formula: every stage takes its gradients at weights that are as many updates old as
the schedule says, and drains at the end of an epoch, as the executor does. So delays need no workers. Each optimiser
has the rate of a small grid at which one process learns fastest (the largest mean accuracy over all epochs, with a seed
of its own); every way is also run at the other rates of the grid, so that the table also has each way at its own best
rate. Runs are added to FILE, a JSON object a line; runs that FILE has are not repeated. The tables are of all of FILE.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jobs import JOBS, accuracy
from learning import NEAR, Task
from learning import TASKS as LEARNING_TASKS
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from pipeplan_launch.job.loading import load_job
from pipeplan_launch.job.presets import muon
from pipeplan_launch.runtime.data import Batches, minibatch_sizes

TASKS: Mapping[str, Task] = {
    **LEARNING_TASKS,
    "resnet": Task(f"{JOBS}:resnet", 32, 8, ()),
    "lstm": Task(f"{JOBS}:lstm", 16, 12, ()),
    "larger": Task(f"{JOBS}:larger", 16, 3, ("blocks.2.norm1", "blocks.4.norm1")),
}
TUNING_SEED = 100
OPTIMIZERS: Mapping[str, Callable[[Sequence[nn.Parameter], float], Optimizer]] = {
    "adamw": lambda parameters, rate: AdamW(parameters, lr=rate, fused=True),
    "sgd": lambda parameters, rate: SGD(parameters, lr=rate, momentum=0.9, fused=True),
    "nadam": lambda parameters, rate: NAdam(
        parameters, lr=rate, betas=(0.99, 0.999), decoupled_weight_decay=True, foreach=True
    ),
    "muon": lambda parameters, rate: muon(rate, weight_decay=0.01)(list(parameters)),
}
RATES: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "digits": {
        "adamw": (1e-3, 2e-3, 4e-3, 8e-3),
        "sgd": (1e-3, 3e-3, 0.01, 0.03, 0.1),
        "nadam": (1e-3, 2e-3, 4e-3, 8e-3),
        "muon": (2e-3, 4e-3, 8e-3, 0.016),
    },
    "text": {
        "adamw": (2e-3, 4e-3, 8e-3, 0.016),
        "sgd": (0.01, 0.03, 0.1),
        "nadam": (2e-3, 4e-3, 8e-3),
        "muon": (4e-3, 8e-3, 0.016, 0.032),
    },
    "resnet": {
        "adamw": (2e-3, 4e-3, 8e-3, 0.016),
        "sgd": (3e-3, 0.01, 0.03, 0.1),
        "nadam": (1e-3, 2e-3, 4e-3, 8e-3),
        "muon": (2e-3, 4e-3, 8e-3, 0.016),
    },
    "lstm": {
        "adamw": (2e-3, 4e-3, 8e-3, 0.016, 0.032),
        "sgd": (0.1, 0.3, 1.0, 3.0, 10.0),
        "nadam": (4e-3, 8e-3, 0.016, 0.032),
    },
    "larger": {"adamw": (5e-4, 1e-3, 2e-3), "sgd": (0.03, 0.1, 0.3), "nadam": (5e-4, 1e-3, 2e-3)},
}
"""The grid of rates by task and optimiser. One process learns fastest at an inner rate of those of digits, ResNet and
LSTM, and of the text with AdamW."""
CORRECTIONS = ("none", "ef")


@dataclass(frozen=True)
class Delays:
    """A schedule, as its stages see it."""

    name: str
    ages: tuple[int, ...]
    """Updates by which the gradients of each stage are late; a single stage is the whole model."""
    groups: tuple[int, ...] = ()
    """Minibatches per update of each stage; empty for one at each."""
    stop: int = 0
    """Epochs at the start whose gradients are fresh (--flush-epochs)."""

    def group(self, stage: int) -> int:
        """Minibatches per update of a stage."""
        return self.groups[stage] if self.groups else 1


WAYS = (
    Delays("one process", (0,)),
    Delays("2bw", (1,)),
    Delays("1f1b-stashing 1-1-1", (2, 1, 0)),
    Delays("1f1b-stashing 2-1", (2, 0), (2, 1)),
    Delays("1f1b-stashing 1-2", (2, 1), (1, 2)),
    Delays("vertical-sync 1-1-1", (2,)),
    Delays("all stages 4 late", (4,)),
    Delays("all stages 8 late", (8,)),
)
BY_DELAY = ("one process", "2bw", "vertical-sync 1-1-1", "all stages 4 late", "all stages 8 late")
"""The ways with the same delay at every stage: 0, 1, 2, 4 and 8."""
WITH_STASHING = (*BY_DELAY[:2], "1f1b-stashing 1-1-1", *BY_DELAY[2:])
CHOSEN = {"text": WITH_STASHING, "resnet": BY_DELAY, "lstm": BY_DELAY, "larger": WITH_STASHING[:3]}
"""The ways of the tasks that do not have all."""
FLUSHED_FIRST = tuple(Delays(WAYS[way].name, WAYS[way].ages, WAYS[way].groups, 1) for way in (1, 2, 5))
TUNED_FOR_ONE_PROCESS_ONLY = ("larger",)
"""The tasks that have no runs at the other rates, because they take long."""


@dataclass(frozen=True)
class Run:
    """One run: what it was, and its curves by epoch."""

    task: str
    way: str
    correction: str
    optimizer: str
    rate: float
    seed: int
    stop: int
    loss: list[float]
    accuracy: list[float]

    @property
    def key(self) -> tuple[Any, ...]:
        """All but the curves."""
        return (self.task, self.way, self.correction, self.optimizer, self.rate, self.seed, self.stop)


class Stage:
    """Some of the parameters, their optimiser, and the versions that gradients to come are taken at."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: Optimizer, age: int, group: int) -> None:
        self.parameters, self.optimizer, self.age, self.group = parameters, optimizer, age, group
        self.versions = [self._copy()]
        self.steps: list[list[Tensor]] = []
        self.gathered = 0

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def drain(self) -> None:
        """All weights are fresh."""
        self.versions = [self._copy()]

    def use_stale(self) -> None:
        """Let the model see the weights that the next minibatch is owed: never from before the last drain."""
        for parameter, value in zip(self.parameters, self.versions[0], strict=True):
            parameter.data = value.clone()

    def after_minibatch(self, last: bool, corrected: bool, fresh: bool) -> None:
        """Update, if the group ends here."""
        for parameter, value in zip(self.parameters, self.versions[-1], strict=True):
            parameter.data = value.clone()
        self.gathered += 1
        if self.gathered < self.group and not last:
            return
        for parameter in self.parameters:
            if parameter.grad is not None and self.gathered > 1:
                parameter.grad /= self.gathered
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.gathered = 0
        if corrected and self.age and not fresh:
            self._correct()
        self.versions.append(self._copy())
        del self.versions[: -1 if fresh else -1 - self.age]

    def _correct(self) -> None:
        """p += d(t) − d(t − τ), from the update on that has an older one to compare with."""
        step = [p.detach() - value for p, value in zip(self.parameters, self.versions[-1], strict=True)]
        self.steps.append(step)
        if len(self.steps) > self.age:
            for parameter, now, before in zip(self.parameters, step, self.steps.pop(0), strict=True):
                parameter.data += now - before


def train(name: str, way: Delays, optimizer: str, rate: float, correction: str, seed: int) -> Run:
    """Train by the formula."""
    task: Task = TASKS[name]
    job = load_job(task.ref, seed)
    assert job.loss is not None
    data, model = job.datasets, job.model
    cuts = task.cuts[len(task.cuts) + 1 - len(way.ages) :]
    stages = [
        Stage(parameters, OPTIMIZERS[optimizer](parameters, rate), age, way.group(number))
        for number, (parameters, age) in enumerate(zip(_split(model, cuts), way.ages, strict=True))
    ]
    sizes = minibatch_sizes(data.train, task.minibatch, dynamic=True, training=True)
    run = Run(name, way.name, correction, optimizer, rate, seed, way.stop, [], [])
    for epoch in range(task.epochs):
        batches, losses, fresh = Batches(data.train, sizes, seed, epoch), [], epoch < way.stop
        model.train()
        for stage in stages:
            stage.drain()
        for number in range(sizes.count):
            batch = batches.load(number)
            for stage in stages:
                stage.use_stale()
            loss = job.loss(model(*batch.inputs), batch.target)
            loss.backward()
            losses.append(loss.item())
            for stage in stages:
                stage.after_minibatch(number == sizes.count - 1, correction == "ef", fresh)
        run.loss.append(statistics.fmean(losses))
        run.accuracy.append(accuracy(job))
    return run


def _split(model: nn.Module, cuts: Sequence[str]) -> list[list[nn.Parameter]]:
    """The parameters of each stage: of the modules from each cut on, in the order of their definition."""
    stages: list[list[nn.Parameter]] = [[]]
    for name, parameter in model.named_parameters():
        if len(stages) <= len(cuts) and name.startswith(cuts[len(stages) - 1]):
            stages.append([])
        stages[-1].append(parameter)
    assert len(stages) == len(cuts) + 1
    return stages


class Results:
    """The runs of a file, to which new ones are added as they end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.runs = {run.key: run for run in (Run(**json.loads(line)) for line in lines)}

    def of(self, name: str, way: Delays, optimizer: str, rate: float, correction: str, seed: int) -> Run:
        """A run, made unless the file has it."""
        key = (name, way.name, correction, optimizer, rate, seed, way.stop)
        if key not in self.runs:
            run = train(name, way, optimizer, rate, correction, seed)
            self.runs[run.key] = run
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(run)) + "\n")
        return self.runs[key]


def best_rate(results: Results, name: str, optimizer: str) -> float:
    """The rate of the grid at which one process learns fastest."""

    def worth(rate: float) -> float:
        return statistics.fmean(results.of(name, WAYS[0], optimizer, rate, "none", TUNING_SEED).accuracy)

    return max(RATES[name][optimizer], key=worth)


def wanted(name: str) -> Iterator[tuple[Delays, str]]:
    """Ways and corrections, the most telling first."""
    ways = [way for way in WAYS if name not in CHOSEN or way.name in CHOSEN[name]]
    yield from ((way, "none") for way in ways)
    yield from ((way, "ef") for way in ways if any(way.ages))
    if name == "digits":
        yield from ((way, correction) for way in FLUSHED_FIRST for correction in ("none", "ef"))


def measure(results: Results, name: str, optimizers: Sequence[str], seeds: int) -> None:
    """Make all runs of a task: first at the rate of one process, then at the others."""
    for seed in range(seeds):
        for optimizer in optimizers:
            rate = best_rate(results, name, optimizer)
            for way, correction in wanted(name):
                results.of(name, way, optimizer, rate, correction, seed)
    if name in TUNED_FOR_ONE_PROCESS_ONLY:
        return
    for seed in range(seeds):
        for optimizer in optimizers:
            for way, correction in wanted(name):
                for rate in RATES[name][optimizer] if not way.stop else ():
                    results.of(name, way, optimizer, rate, correction, seed)


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Mean and standard deviation of those that are finite."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "–"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{text(statistics.fmean(values))} ± {text(deviation)}"


def epochs_to(run: Run, goal: float) -> float:
    """Epochs until the goal, between two epochs by the straight line between their accuracies; infinite if never."""
    before = 0.0
    for epoch, one in enumerate(run.accuracy):
        if one >= goal:
            return epoch + (goal - before) / (one - before)
        before = one
    return float("inf")


def show(results: Results) -> None:
    """Print Markdown tables of all runs in the file."""
    runs = [
        run for run in results.runs.values() if run.seed != TUNING_SEED and run.rate in RATES[run.task][run.optimizer]
    ]
    print("\n".join(_summary(results, runs)), end="\n\n")
    for name in sorted({run.task for run in runs}):
        for optimizer in sorted({run.optimizer for run in runs if run.task == name}):
            rate = best_rate(results, name, optimizer)
            print("\n".join(_table(name, optimizer, rate, runs)), end="\n\n")


def _summary(results: Results, runs: Sequence[Run]) -> Iterator[str]:
    """The lines of a table of epochs to the goal over those of one process, each at its own best rate, by task."""
    kinds = sorted({(run.optimizer, run.task) for run in runs if len(RATES[run.task][run.optimizer]) > 1})
    yield "Epochs to the goal over those of one process, each at its own best rate (seeds that reach it)"
    yield ""
    yield f"| schedule | correction | {' | '.join(f'{task}, {optimizer}' for optimizer, task in kinds)} |"
    yield "|---" * (2 + len(kinds)) + "|"
    for way in WAYS[1:]:
        for correction in CORRECTIONS:
            cells = [_over_one_process(results, runs, task, optimizer, way, correction) for optimizer, task in kinds]
            if any(cells):
                yield f"| {way.name} | {correction} | {' | '.join(cells)} |"


def _over_one_process(
    results: Results, runs: Sequence[Run], name: str, optimizer: str, way: Delays, correction: str
) -> str:
    """Mean epochs to the goal over those of one process, and the seeds that reach it; empty where nothing is known."""
    mine = [run for run in runs if (run.task, run.optimizer, run.stop) == (name, optimizer, 0)]
    single = [run for run in mine if run.way == "one process"]
    at = [run for run in single if run.rate == best_rate(results, name, optimizer)]
    found = [run for run in mine if (run.way, run.correction) == (way.name, correction)]
    if not at or not found:
        return ""
    goal = statistics.fmean(run.accuracy[-1] for run in at) - NEAR
    one, other = (_times_at_best(some, goal) for some in (single, found))
    if not one or not other:
        return ""
    there = [time for time in other[1] if math.isfinite(time)]
    least = [time for time in one[1] if math.isfinite(time)]
    ratio = f"{statistics.fmean(there) / statistics.fmean(least):.2f}" if there and least else "–"
    return f"{ratio} ({len(there)}/{len(other[1])})"


def _table(name: str, optimizer: str, rate: float, runs: Sequence[Run]) -> Iterator[str]:
    """The lines of the table of a task and an optimiser at the rate of one process."""
    mine = [run for run in runs if (run.task, run.optimizer) == (name, optimizer)]
    single = [run for run in mine if run.way == "one process" and run.rate == rate]
    if not single:
        return
    goal = statistics.fmean(run.accuracy[-1] for run in single) - NEAR
    yield f"{name}, {optimizer} at {rate:g}, goal {100 * goal:.1f}% (one process at its end, less half a point)"
    yield ""
    yield "| schedule | correction | epochs to the goal | seeds | last loss | accuracy % at the end | own best rate |"
    yield "|---|---|---|---|---|---|---|"
    for way in (*WAYS, *FLUSHED_FIRST):
        for correction in CORRECTIONS:
            same = [run for run in mine if (run.way, run.correction, run.stop) == (way.name, correction, way.stop)]
            at = [run for run in same if run.rate == rate]
            if not at:
                continue
            times = [epochs_to(run, goal) for run in at]
            there = [time for time in times if time < float("inf")]
            cells = (
                way.name + (", first epoch flushed" if way.stop else ""),
                correction if any(way.ages) else "",
                spread(there, "{:.2f}".format),
                f"{len(there)} of {len(at)}",
                spread([run.loss[-1] for run in at], "{:.3f}".format),
                spread([100 * run.accuracy[-1] for run in at], "{:.1f}".format),
                _own_best(same, goal),
            )
            yield f"| {' | '.join(cells)} |"


def _own_best(runs: Sequence[Run], goal: float) -> str:
    """The rate of the grid at which a way learns fastest, and its epochs to the goal, over seeds run at every rate."""
    if (found := _times_at_best(runs, goal)) is None:
        return ""
    best, times = found
    there = [time for time in times if time < float("inf")]
    return f"{best:g}: {spread(there, '{:.2f}'.format)} ({len(there)}/{len(times)})"


def _times_at_best(runs: Sequence[Run], goal: float) -> tuple[float, list[float]] | None:
    """(rate, epochs to the goal by seed) of a way at its own best rate; None if it was run at one rate only.

    That is the largest mean accuracy over all epochs, by which the rate of one process is chosen as well.
    """
    by_rate = {rate: {run.seed: run for run in runs if run.rate == rate} for rate in {run.rate for run in runs}}
    common = set.intersection(*(set(found) for found in by_rate.values())) if by_rate else set()
    if len(by_rate) < 2 or not common:
        return None

    def worth(rate: float) -> float:
        return statistics.fmean(statistics.fmean(by_rate[rate][seed].accuracy) for seed in common)

    best = max(sorted(by_rate), key=worth)
    return best, [epochs_to(by_rate[best][seed], goal) for seed in sorted(common)]


def main() -> None:
    """Make what runs are missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("what", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # A run that diverges would take ten times as long.
    results = Results(given.file)
    for name in given.what or TASKS:
        measure(results, name, given.optimizers.split(","), given.seeds)
    show(results)


if __name__ == "__main__":
    main()

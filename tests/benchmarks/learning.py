"""Whether pipelines learn in as many epochs as one process, on digits and on text: both curves, epoch by epoch.

    python tests/benchmarks/learning.py [digits] [text] [rates] [limits]

One process is an ordinary loop over the same samples in the same order. Every plan then trains from the same weights,
with the executor's own workers. Schedules that flush, and 2BW, split each minibatch in four and make one update of
them, so that all have as many samples per update as one process; asynchronous plans make one per minibatch, and a
stage with two replicas one per two. `rates` raises the learning rate until asynchronous training fails; `limits` works
out when that must be, for gradients that are some updates old. All is seeded.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jobs import JOBS, accuracy
from rich.console import Console
from rich.table import Table

from pipeplan_launch.job.loading import load_job
from pipeplan_launch.runtime.data import Batches, minibatch_sizes
from pipeplan_launch.tracing.trace import trace_job

MICROBATCHES = 4
NEAR = 0.005
"""How near to the accuracy of one process counts as reaching it: half a point."""
DIGITS_CUTS, TEXT_CUTS = ("conv2", "fc2"), ("blocks.1.norm1", "blocks.2.norm1")


@dataclass(frozen=True)
class Task:
    """What is trained."""

    ref: str
    minibatch: int
    epochs: int
    cuts: tuple[str, ...]
    """The layers that the second and the third of three stages begin with; the second one splits two. None for a task
    that is not split."""
    seeds: int = 1
    """Runs whose mean counts."""


@dataclass(frozen=True)
class Way:
    """How."""

    schedule: str
    replicas: tuple[int, ...]

    @property
    def splits(self) -> bool:
        """Whether an update is made of several parts of a minibatch."""
        return self.schedule in ("2bw", "1f1b-flush", "gpipe")

    def __str__(self) -> str:
        return f"{self.schedule} {'-'.join(map(str, self.replicas))}"


@dataclass(frozen=True)
class Curve:
    """By epoch."""

    loss: list[float]
    """Mean of the training loss over the epoch."""
    accuracy: list[float]
    """On the test set, after the epoch."""


TASKS = {
    "digits": Task("mnist", 32, 10, DIGITS_CUTS, seeds=3),
    "text": Task(f"{JOBS}:text", 8, 14, TEXT_CUTS),
}
WAYS = (
    Way("1f1b-stashing", (1, 1, 1)),
    Way("1f1b-stashing", (2, 1)),
    Way("vertical-sync", (1, 1, 1)),
    Way("2bw", (1, 1, 1)),
    Way("1f1b-flush", (1, 1, 1)),
)
RATES = {"momentum 0.9": ("low", "middle", "high"), "no momentum": ("low0", "middle0", "high0")}
RATES_EPOCHS = 6
DELAYS, MOMENTA = (0, 1, 2, 3, 4, 8), (0.0, 0.5, 0.9)


def one_process(task: Task, seed: int) -> Curve:
    """An ordinary training loop."""
    job = load_job(task.ref, seed)
    assert job.loss is not None
    model, data = job.model, job.datasets
    optimizer = job.make_optimizer(list(model.parameters()))
    sizes = minibatch_sizes(data.train, task.minibatch, dynamic=True, training=True)
    curve = Curve([], [])
    for epoch in range(task.epochs):
        batches = Batches(data.train, sizes, seed, epoch)
        losses = []
        model.train()
        for number in range(sizes.count):
            batch = batches.load(number)
            optimizer.zero_grad()
            loss = job.loss(model(*batch.inputs), batch.target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curve.loss.append(statistics.fmean(losses))
        curve.accuracy.append(accuracy(job))
    return curve


def pipeline(task: Task, way: Way, seed: int) -> Curve:
    """Train with the executor's workers, one process each."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_plan(folder, task, way)
        world = sum(way.replicas)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "pipeplan_launch.worker"])
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        given = ["--epochs", str(task.epochs), "--seed", str(seed), "--checkpoint-every", str(task.epochs)]
        arguments = [str(folder), "--run-dir", str(folder / "run"), "--threads", "1", *given]
        workers = [
            context.Process(target=_work, args=(rank, world, store.port, arguments, str(folder / f"{rank}.log")))
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("\n".join((folder / f"{rank}.log").read_text() for rank in range(world)))
        epochs = json.loads((folder / "run" / "summary.json").read_text())["epochs"]
    return Curve(
        [float("nan") if one["loss"] is None else one["loss"] for one in epochs],
        [one["test_accuracy"] for one in epochs],
    )


def write_plan(folder: Path, task: Task, way: Way) -> None:
    """The stage files of a plan, with the least depths that keep every stage fed."""
    job = load_job(task.ref, 0)
    traced = trace_job(job, 8)
    cuts = task.cuts if len(way.replicas) == 3 else task.cuts[1:]
    layers: list[list[str]] = [[]]
    for layer in traced.layers:
        if layer.name in cuts:
            layers.append([])
        layers[-1].append(layer.name)
    depths = [1]
    for here, following in zip(way.replicas[-2::-1], way.replicas[:0:-1], strict=True):
        depths.insert(0, 1 - (-depths[0] * following // here))
    ranks = iter(range(sum(way.replicas)))
    stages = [
        {"workers": [next(ranks) for _ in range(count)], "depth": depth, "versions": depth + 1}
        for count, depth in zip(way.replicas, depths, strict=True)
    ]
    (folder / "stages").mkdir()
    for stage, names in enumerate(layers):
        content = {
            "format": "pipeplan-stage",
            "version": 1,
            "plan": "sha256:benchmark",
            "mode": "training",
            "model": {"ref": task.ref, "graph_hash": traced.graph_hash},
            "minibatch": task.minibatch // MICROBATCHES if way.splits else task.minibatch,
            "device": "cpu",
            "servers": 1,
            "workers_per_server": sum(way.replicas),
            "schedule": {"name": way.schedule, "accumulate": MICROBATCHES if way.splits else None},
            "pipeline": stages,
            "stage": stage,
            "layers": names,
        }
        (folder / "stages" / f"stage-{stage}.json").write_text(json.dumps(content))


def _work(rank: int, world: int, port: int, arguments: Sequence[str], log: str) -> None:
    from pipeplan_launch import __main__

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with open(log, "w") as sink:
        sys.stdout = sys.stderr = sink
        status = __main__.main(arguments)
    os._exit(status)


def mean(curves: Sequence[Curve]) -> Curve:
    """Of several seeds."""
    return Curve(
        [statistics.fmean(values) for values in zip(*(one.loss for one in curves), strict=True)],
        [statistics.fmean(values) for values in zip(*(one.accuracy for one in curves), strict=True)],
    )


def reached(curve: Curve, accuracy: float) -> str:
    """The first epoch after which the accuracy is there, counted from 1."""
    return next((str(epoch) for epoch, one in enumerate(curve.accuracy, start=1) if one >= accuracy), "–")


def compare(console: Console, name: str) -> None:
    """Print the curves of a task."""
    task = TASKS[name]
    seeds = range(task.seeds)
    curves = {"one process": mean([one_process(task, seed) for seed in seeds])}
    for way in WAYS:
        curves[str(way)] = mean([pipeline(task, way, seed) for seed in seeds])
    goal = curves["one process"].accuracy[-1] - NEAR
    console.print(f"\n{name}: {task.epochs} epochs, minibatch {task.minibatch}, mean of {task.seeds} seeds")
    for title, values, text in (
        ("training loss after epoch", "loss", "{:.3f}".format),
        ("test accuracy, %, after epoch", "accuracy", lambda value: f"{100 * value:.1f}"),
    ):
        table = Table(title=title, title_justify="left")
        table.add_column("")
        for epoch in range(task.epochs):
            table.add_column(str(epoch + 1), justify="right")
        for label, curve in curves.items():
            table.add_row(label, *map(text, getattr(curve, values)))
        console.print(table)
    table = Table(title=f"epochs until {100 * goal:.1f}% (one process at its end, less half a point)")
    table.add_column("")
    table.add_column("epochs", justify="right")
    for label, curve in curves.items():
        table.add_row(label, reached(curve, goal))
    console.print(table)


def rates(console: Console) -> None:
    """Print how far the learning rate can go."""
    way = Way("1f1b-stashing", (1, 1, 1))
    table = Table(title=f"digits, SGD: test accuracy in % after {RATES_EPOCHS} epochs (training loss of the last)")
    for heading in ("momentum", "learning rate", "one process", str(way)):
        table.add_column(heading, justify="right")
    for momentum, names in RATES.items():
        for name in names:
            task = Task(f"{JOBS}:{name}", 32, RATES_EPOCHS, DIGITS_CUTS)
            rate = load_job(task.ref, 0).make_optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
            curves = one_process(task, 0), pipeline(task, way, 0)
            ends = (f"{100 * curve.accuracy[-1]:.1f} ({curve.loss[-1]:.3f})" for curve in curves)
            table.add_row(momentum, str(rate), *ends)
    console.print(table)


def limit(delay: int, momentum: float) -> float:
    """The learning rate, times the curvature, below which SGD settles in a parabola with gradients `delay` updates old.

    x(t+1) = x(t) + m (x(t) − x(t−1)) − s x(t−delay) settles if all roots of
    z^(delay+2) − (1+m) z^(delay+1) + m z^delay + s z are inside the unit circle. Without momentum that is
    s < 2 sin(π / (4 delay + 2)): Levin and May, A note on difference-delay equations, 1976.
    """
    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        companion = torch.diag(torch.ones(delay + 1, dtype=torch.float64), -1)
        companion[0, 0] = 1 + momentum
        companion[0, 1] = -momentum
        companion[0, delay] -= middle
        if torch.linalg.eigvals(companion).abs().max() < 1:
            low = middle
        else:
            high = middle
    return low


def limits(console: Console) -> None:
    """Print how far staleness and momentum lower the largest learning rate."""
    table = Table(title="largest stable learning rate × curvature, by the age of the gradient in updates")
    table.add_column("momentum")
    for delay in DELAYS:
        table.add_column(str(delay), justify="right")
    for momentum in MOMENTA:
        table.add_row(str(momentum), *(f"{limit(delay, momentum):.3f}" for delay in DELAYS))
    console.print(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*TASKS, "rates", "limits"]
    parser.add_argument("what", nargs="*", help=f"of {', '.join(every)}; by default all")
    given = parser.parse_args()
    if unknown := set(given.what) - set(every):
        parser.error(f"there is no {unknown.pop()!r}: choose among {', '.join(every)}")
    torch.set_num_threads(1)
    console = Console(width=160)
    for name in given.what or every:
        begun = time.perf_counter()
        if name in ("rates", "limits"):
            {"rates": rates, "limits": limits}[name](console)
        else:
            compare(console, name)
        console.print(f"({time.perf_counter() - begun:.0f} s)")


if __name__ == "__main__":
    main()

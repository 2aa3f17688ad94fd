"""Predicted beside measured: step times and memory of small jobs on this machine, and workers beside a plain loop.

    python tests/benchmarks/first_prediction.py [times] [--only NAME] [--runs N]
    python tests/benchmarks/first_prediction.py memory [--only NAME]
    python tests/benchmarks/first_prediction.py unseen [--only NAME] [--runs N]
    python tests/benchmarks/first_prediction.py loop [--runs N]

`times`: the first prediction that a user sees. Profile, plan and run are made N times (3) one after the other, so that
a machine whose speed changes within minutes has the same speed in a prediction and in its run, and the median counts.

`unseen`: the same for ten jobs of Hugging Face families, to which nothing is fitted: AdamW, warm-up, clipping by the
global norm, dropout, autocast. Two stages on two workers, and last the median error and how many are within 15%.

`memory`: the peak of every worker against the planner's figure, for unreplicated plans that train 16 minibatches.
The prediction includes a worker without a model and what the allocator takes, as measured on this machine. Neither
counts the data set, or code that is loaded at first use.

`loop`: the README's job on one, two and three workers beside what a user writes without pipeplan: one thread, the same
model, samples, optimiser and minibatch. The sides take turns. Both leave out the beginning: the loop a tenth of its
minibatches, a pipeline the fill of every epoch.

The load of the processor is printed with the times: where others use the machine, the measured times are theirs too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import JOBS
from rich.console import Console
from rich.table import Table

PIPEPLAN = (sys.executable, "-m", "pipeplan")
INIT = f"{Path(__file__).parents[2] / 'templates' / 'init' / 'job.py'}:build"
LEAST_MINIBATCHES, LOOP_MINIBATCHES = 900, 900
LEFT_OUT = 10
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A model and the number of stages of its plan, each on one worker."""

    name: str
    ref: str
    stages: int
    epoch: int = 0
    """Minibatches of an epoch."""
    profile: tuple[str, ...] = ()
    """Further options of `pipeplan profile`."""


TIMES = (
    Case("readme", "mnist", 3, 45),
    Case("init", INIT, 2, 1024),
    *(Case(name, f"{JOBS}:{name}", count, 64) for name in ("mlp", "convolutions", "attention") for count in (1, 2, 3)),
)
UNSEEN_JOBS = Path(__file__).with_name("unseen_jobs.py")
UNSEEN = tuple(
    Case(name, f"{UNSEEN_JOBS}:{name}", 2, 128)
    for name in ("opt", "gpt_neox", "electra", "roberta", "bart", "qwen2", "deit", "convnext", "regnet", "swin")
)
UNSEEN_MINIBATCHES = 200
CLOSE = 0.15
MEMORY = (
    Case("readme", "mnist", 3),
    Case("init", INIT, 2),
    *(Case(name, f"{JOBS}:large_{name}", 2) for name in ("mlp", "resnet", "lstm")),
    Case("alexnet", "alexnet", 2, profile=("--microbatch", "16")),
)


def call(*command: object, folder: Path) -> str:
    """The output of a command. Raises `SystemExit` with it where the command fails."""
    done = subprocess.run([str(one) for one in command], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stdout}{done.stderr}")
    return done.stdout


def train(plan: Path, run: Path, *options: object) -> dict[str, Any]:
    """Run a plan; the summary."""
    call(plan / "launch.sh", *options, "--log-every", 0, "--run-dir", run, folder=plan)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def solve(profile: Path, workers: int, plan: Path, *options: object) -> None:
    """The best plan with a stage on each of so many workers of this machine."""
    shape = ("--workers", workers, "--stages", workers, "--max-replicas", 1)
    call(*PIPEPLAN, "solve", profile, "--cluster", "local", *shape, *options, "-o", plan, folder=profile.parent)


def times(given: argparse.Namespace, folder: Path) -> Table:
    """Predicted and measured minibatches per second."""
    return predictions(TIMES, LEAST_MINIBATCHES, given, folder)[0]


def unseen(given: argparse.Namespace, folder: Path) -> Table:
    """The same for jobs to which nothing is fitted."""
    table, ratios = predictions(UNSEEN, UNSEEN_MINIBATCHES, given, folder)
    errors = [abs(ratio - 1) for ratio in ratios]
    within = f"{sum(error <= CLOSE for error in errors)} of {len(errors)} within {CLOSE:.0%}"
    table.caption = f"median error {statistics.median(errors):.1%}, {within}"
    return table


def predictions(
    cases: tuple[Case, ...], minibatches: int, given: argparse.Namespace, folder: Path
) -> tuple[Table, list[float]]:
    """Predicted and measured minibatches per second of cases; and the measured over the predicted rates."""
    table = Table("model", "stages", "predicted/s", "measured/s", "measured/predicted", "range", "load")
    medians = []
    for case in chosen(cases, given.only):
        found = []
        for number in range(given.runs):
            place = folder / f"{case.name}-{case.stages}-{number}"
            place.mkdir()
            call(*PIPEPLAN, "profile", case.ref, "-o", "profile.json", folder=place)
            solve(place / "profile.json", case.stages, place / "plan")
            epochs = -(-minibatches // case.epoch)
            summary = train(place / "plan", place / "run", "--epochs", epochs)["minibatch_s"]
            found.append((float(summary["predicted"]), float(summary["measured"])))
        rates = (f"{1 / statistics.median(one):.1f}" for one in zip(*found, strict=True))
        ratios = sorted(predicted / measured for predicted, measured in found)
        medians.append(statistics.median(ratios))
        shown = f"{medians[-1]:.0%}", f"{ratios[0]:.0%}-{ratios[-1]:.0%}"
        table.add_row(case.name, str(case.stages), *rates, *shown, f"{os.getloadavg()[0]:.1f}")
    return table, medians


def memory(given: argparse.Namespace, folder: Path) -> Table:
    """Predicted and measured memory of every stage."""
    table = Table("model", "stage", "predicted MiB", "measured MiB", "measured/predicted")
    for case in chosen(MEMORY, given.only):
        place = folder / case.name
        place.mkdir()
        call(*PIPEPLAN, "profile", case.ref, *case.profile, "-o", "profile.json", folder=place)
        minibatch = json.loads((place / "profile.json").read_text())["minibatch"]
        solve(
            place / "profile.json",
            case.stages,
            place / "plan",
            "--schedule",
            "1f1b-stashing",
            "--microbatch",
            minibatch,
        )
        for stage in train(place / "plan", place / "run", "--epochs", 1, "--max-minibatches", 16)["stages"]:
            figures = stage["memory_bytes"]
            sizes = [f"{figures[key] / MIB:.0f}" for key in ("predicted", "measured")]
            table.add_row(case.name, str(stage["stage"]), *sizes, f"{figures['ratio']:.2f}")
    return table


def chosen(cases: tuple[Case, ...], name: str | None) -> list[Case]:
    """The cases of a name, or all."""
    return [case for case in cases if name in (None, case.name)]


def loop(given: argparse.Namespace, folder: Path) -> Table:
    """Minibatches per second of a plain loop, and of workers."""
    call(*PIPEPLAN, "profile", "mnist", "-o", "profile.json", folder=folder)
    rates: dict[str, list[float]] = {}
    for turn in range(given.runs):
        rates.setdefault("plain loop", []).append(float(call(sys.executable, __file__, "plain", folder=folder)))
        for workers in (1, 2, 3):
            plan = folder / f"plan-{workers}"
            if not plan.exists():
                solve(folder / "profile.json", workers, plan)
            summary = train(plan, plan / "runs" / str(turn), "--epochs", -(-LOOP_MINIBATCHES // 45))
            rates.setdefault(f"{workers} workers", []).append(1 / float(summary["minibatch_s"]["measured"]))
    table = Table("", "minibatches/s", "of the loop", "range", f"load {os.getloadavg()[0]:.1f}")
    first = statistics.median(rates["plain loop"])
    for name, found in rates.items():
        middle = statistics.median(found)
        table.add_row(name, f"{middle:.0f}", f"{middle / first:.0%}", f"{min(found):.0f}-{max(found):.0f}")
    return table


def plain_loop() -> float:
    """Minibatches per second of one process."""
    import torch

    from pipeplan_launch import load_job

    torch.set_num_threads(1)
    job = load_job("mnist", seed=0)
    assert job.loss is not None
    samples, targets = job.datasets.train[:]
    optimizer = job.make_optimizer(list(job.model.parameters()))
    begun, left_out = 0.0, LOOP_MINIBATCHES // LEFT_OUT
    for number in range(LOOP_MINIBATCHES):
        if number == left_out:
            begun = time.perf_counter()
        rows = torch.randint(len(samples), (job.minibatch,))
        optimizer.zero_grad()
        loss = job.loss(job.model(samples[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        loss.item()
    return (LOOP_MINIBATCHES - left_out) / (time.perf_counter() - begun)


TABLES: Mapping[str, Callable[[argparse.Namespace, Path], Table]] = {
    "times": times,
    "unseen": unseen,
    "memory": memory,
    "loop": loop,
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=(*TABLES, "plain"), default="times")
    parser.add_argument("--only", help="only this model")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    if given.what == "plain":
        print(plain_loop())
        return
    with tempfile.TemporaryDirectory() as scratch:
        Console(width=120).print(TABLES[given.what](given, Path(scratch)))


if __name__ == "__main__":
    main()

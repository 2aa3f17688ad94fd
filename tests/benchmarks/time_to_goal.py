"""The time in which two workers reach a training loss, by the way in which they train and by the link between them.

    PYTHONPATH=tests/support python tests/benchmarks/time_to_goal.py FILE [--links none,1gbit,100mbit] [--show]

The model has most of its weights in fully connected layers and learns the scanned digits of scikit-learn (`digits` of
jobs.py), with 32 samples per update on every side. The ways are DistributedDataParallel (DDP), two schedules of
torch.distributed.pipelining, and three of pipeplan, each from the same initial weights and over the same samples of a
seed, with the same optimiser at the same rate. The goal is a mean training loss over an epoch, because the accuracy on
360 test samples jumps by a point from epoch to epoch; between two epochs the way to the goal is a straight line of
their losses. The time is that of training, without evaluations. Runs take turns, so that a busy spell of the machine
does not fall on one way alone. Each is added to FILE, a JSON object a line; runs that FILE has are not repeated.
Links other than `none` are network namespaces joined by a shaped virtual cable, which most machines allow.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import peers_run
import peers_torch
from jobs import DIGITS_BATCH, JOBS
from peers_run import INSIDE, WORKERS, Ground, Here, Shaped, cluster_file, in_own_network, pipeplan, torchrun

SUBJECT = "digits"
GOAL = 0.1
EPOCHS = 8
LIMIT_S = 1800.0
LINKS: Mapping[str, str] = {"none": "", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
FLUSH_FIRST = ("--flush-epochs", "1")
"""Options of launch.sh: the first epoch is synchronous."""
CORRECTED = ("--correction", "ef")
OURS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "pipeplan 1f1b-flush": ("1f1b-flush", ()),
    "pipeplan 2bw, corrected": ("2bw", CORRECTED),
    "the same, first epoch flushed": ("2bw", (*CORRECTED, *FLUSH_FIRST)),
    "pipeplan 1f1b-stashing, corrected": ("1f1b-stashing", CORRECTED),
    "stashing, first epoch flushed": ("1f1b-stashing", (*CORRECTED, *FLUSH_FIRST)),
}
"""The schedule, and options of launch.sh, for each of our ways."""
THEIRS: Mapping[str, str] = {"DDP": "ddp:1", "torch 1F1B": "1f1b:4", "torch ZBVZeroBubble": "zbv:4"}
SYNCHRONOUS = ("DDP", "torch 1F1B", "torch ZBVZeroBubble", "pipeplan 1f1b-flush")


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


def with_torch(ground: Ground, contender: str, seed: int, folder: Path) -> Curves:
    """A run of DDP (`ddp:1`) or of a schedule of torch.distributed.pipelining."""
    result = folder / "peer.json"
    options = ["--subject", SUBJECT, "--contenders", contender, "--seed", seed, "--keep-memory"]
    options += ["--write", result, "--epochs", EPOCHS, "--goal", GOAL]
    ground.run((*torchrun(ground, WORKERS), peers_torch.__file__, *map(str, options)))
    return Curves(**json.loads(result.read_text()))


def with_plan(ground: Ground, plan: Path, seed: int, options: Sequence[str]) -> Curves:
    """A run of a plan, for all epochs."""
    run_dir = plan.parent / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    every = ["--epochs", EPOCHS, "--seed", seed, "--log-every", 0, "--checkpoint-every", EPOCHS]
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


def write_plan(way: str, link: str, folder: Path, plan: Path) -> None:
    """Profile the model for the way's minibatch, and solve for two stages on the link."""
    schedule, batch = OURS[way][0], DIGITS_BATCH
    minibatch = batch if schedule == "1f1b-stashing" else batch // 4
    profile, cluster = folder / f"profile-{minibatch}.json", folder / "cluster.toml"
    if not profile.exists():
        job = f"{JOBS}:{SUBJECT}"
        pipeplan("profile", job, "--microbatch", minibatch, "--repeats", 5, "-o", profile)
    where: tuple[object, ...] = ("--cluster", "local", "--workers", 2)
    if link != "none":
        cluster.write_text(cluster_file(LINKS[link]))
        where = ("--cluster", cluster)
    sizes = ("--microbatch", minibatch, *(() if minibatch == batch else ("--batch", batch)))
    shape = ("--stages", 2, "--no-recompute", "--schedule", schedule)
    pipeplan("solve", profile, *where, *shape, *sizes, "-o", plan)


def measure(results: Results, link: str, seeds: int) -> None:
    """Make all runs over a link that are missing."""
    peers_run.LIMIT_S = LIMIT_S
    with tempfile.TemporaryDirectory() as scratch:
        ground: Ground = Here() if link == "none" else Shaped(link)
        for seed in range(seeds):
            for way in (*THEIRS, *OURS):
                if results.has(link, way, seed):
                    continue
                if way in THEIRS:
                    curves = with_torch(ground, THEIRS[way], seed, Path(scratch))
                else:
                    plan = Path(scratch, way.replace(" ", "-").replace(",", ""))
                    if not plan.exists():
                        write_plan(way, link, Path(scratch), plan)
                    curves = with_plan(ground, plan, seed, OURS[way][1])
                results.add(Run(link, way, seed, curves))
                print(f"{link}, {way}, seed {seed}: {curves.goal_s(GOAL)} s", file=sys.stderr, flush=True)


def table(results: Results) -> str:
    """A Markdown table: epochs, their time, and seconds to the goal, over the seeds that reach it.

    Under `fastest synchronous way` and `DDP` are their seconds to the goal over those of the row.
    """
    heads = "link | way | seeds | epochs | s per epoch | s to the goal | fastest synchronous way | DDP | accuracy %"
    rows = [f"| {heads} |", "|" + "---|" * 9]
    for link in LINKS:
        means = {
            way: statistics.fmean(seconds)
            for way in (*THEIRS, *OURS)
            if (seconds := [run.goal_s(GOAL) or 0 for run in results.of(link, way) if run.goal_s(GOAL)])
        }
        for way, mean in means.items():
            same = results.of(link, way)
            there = [run for run in same if run.goal_s(GOAL)]
            epochs = spread([run.epochs(GOAL) or 0 for run in there], ".1f")
            each = spread([second for run in same for second in run.seconds], ".2f")
            synchronous = min((means[one] for one in SYNCHRONOUS if one in means), default=mean)
            ratios = f"{synchronous / mean:.2f} | {means.get('DDP', mean) / mean:.2f}"
            seconds = spread([run.goal_s(GOAL) or 0 for run in there], ".1f")
            right = spread([100 * (run.goal_accuracy(GOAL) or 0) for run in there], ".1f")
            row = f"{link} | {way} | {len(there)} of {len(same)} | {epochs} | {each} | {seconds} | {ratios} | {right}"
            rows.append(f"| {row} |")
    return "\n".join(rows)


def main() -> int:
    """Make the runs that are missing and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--links", default=",".join(LINKS), help="of none, 1gbit, 100mbit")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--show", action="store_true", help="print the table only")
    given = parser.parse_args()
    links = given.links.split(",")
    if unknown := set(links) - set(LINKS):
        parser.error(f"there is no link {unknown.pop()!r}: choose among {', '.join(LINKS)}")
    if not given.show:
        for link in links:
            if link != "none" and not os.environ.get(INSIDE):
                if status := in_own_network([str(given.file), "--links", link, "--seeds", str(given.seeds)]):
                    return status
            else:
                measure(Results(given.file), link, given.seeds)
    if not os.environ.get(INSIDE):
        print(table(Results(given.file)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The time in which two workers reach a training loss, by the way in which they train and by the link between them.

    python tests/benchmarks/time_to_goal.py FILE [--links none,1gbit,100mbit] [--seeds 5] [--show]

The model has most of its weights in fully connected layers and learns the scanned digits of scikit-learn (`digits` of
peers_jobs.py), with 32 samples per update on every side. The ways are DistributedDataParallel (DDP), two schedules of
torch.distributed.pipelining, and three of pipeplan, each from the same initial weights and over the same samples of a
seed, with the same optimiser at the same rate. The goal is a mean training loss over an epoch, because the accuracy on
360 test samples jumps by a point from epoch to epoch; between two epochs the way to the goal is a straight line of
their losses. The time is that of training, without evaluations. Runs take turns, so that a busy spell of the machine
does not fall on one way alone. Each is added to FILE, a JSON object a line; runs that FILE has are not repeated.
Links other than `none` are network namespaces joined by a shaped virtual cable, which `unshare -Urnm` allows on most
machines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import goal_torch
import peers_jobs
import peers_run
from peers_run import TWO_SERVERS, Command, Ground, Here, Shaped, pipeplan

SUBJECT = "digits"
GOAL = 0.1
EPOCHS = 8
LIMIT_S = 1800.0
INSIDE = "PIPEPLAN_BENCHMARK_INSIDE"
LINKS: Mapping[str, str] = {"none": "", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
FLUSH_FIRST = ("--flush-epochs", "1")
"""Options of launch.sh: the first epoch is synchronous."""
OURS: Mapping[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "pipeplan 1f1b-flush": (("--schedule", "1f1b-flush", "--accumulate", 4), ()),
    "pipeplan 2bw, corrected": (("--schedule", "2bw", "--accumulate", 4, "--correction", "ef"), ()),
    "the same, first epoch flushed": (("--schedule", "2bw", "--accumulate", 4, "--correction", "ef"), FLUSH_FIRST),
    "pipeplan 1f1b-stashing, corrected": (("--schedule", "1f1b-stashing", "--correction", "ef"), ()),
    "stashing, first epoch flushed": (("--schedule", "1f1b-stashing", "--correction", "ef"), FLUSH_FIRST),
}
"""Options of `solve` and of launch.sh for each of our ways."""
THEIRS: Mapping[str, str] = {"DDP": "ddp:1", "torch 1F1B": "1f1b:4", "torch ZBVZeroBubble": "zbv:4"}
SYNCHRONOUS = ("DDP", "torch 1F1B", "torch ZBVZeroBubble", "pipeplan 1f1b-flush")


@dataclass(frozen=True)
class Run:
    """One run, by epoch."""

    link: str
    way: str
    seed: int
    seconds: list[float]
    """Of training."""
    loss: list[float]
    """Mean of the training loss."""
    accuracy: list[float]
    """On the test set, after the epoch."""

    @property
    def epochs(self) -> float | None:
        """Epochs until the goal; None if it was not reached."""
        if (last := self._last) is None:
            return None
        before, now = math.inf if last == 0 else self.loss[last - 1], self.loss[last]
        return last + 1.0 if last == 0 else last + (before - GOAL) / (before - now)

    @property
    def goal_s(self) -> float | None:
        """Seconds of training until the goal; None if it was not reached."""
        if (epochs := self.epochs) is None:
            return None
        whole = math.ceil(epochs) - 1
        return sum(self.seconds[:whole]) + (epochs - whole) * self.seconds[whole]

    @property
    def goal_accuracy(self) -> float | None:
        """The accuracy after the epoch in which the goal was reached."""
        return None if self._last is None else self.accuracy[self._last]

    @property
    def _last(self) -> int | None:
        return next((number for number, one in enumerate(self.loss) if one <= GOAL), None)


def train_theirs(ground: Ground, way: str, link: str, seed: int, folder: Path) -> Run:
    """A run of DDP or of torch.distributed.pipelining."""
    result = folder / "peer.json"
    options = ["--subject", SUBJECT, "--contender", THEIRS[way], "--seed", str(seed), "--write", str(result)]
    options += ["--epochs", str(EPOCHS), "--goal", str(GOAL)]
    torchrun: Command = (sys.executable, "-m", "torch.distributed.run")
    if ground.servers == 1:
        ground.run((*torchrun, "--standalone", "--nproc-per-node", "2", goal_torch.__file__, *options))
    else:
        line = " ".join((*torchrun, f"--nnodes {ground.servers} --nproc-per-node 1"))
        line += ' --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"'
        ground.run(("bash", "-c", line, "peer", goal_torch.__file__, *options))
    found = json.loads(result.read_text())
    return Run(link, way, seed, found["seconds"], found["loss"], found["accuracy"])


def train_ours(ground: Ground, way: str, link: str, seed: int, folder: Path) -> Run:
    """A run of a plan of two stages, for all epochs; the plan is made by the first run."""
    plan, run_dir = folder / way.replace(" ", "-").replace(",", ""), folder / "run"
    if not plan.exists():
        write_plan(way, link, folder, plan)
    shutil.rmtree(run_dir, ignore_errors=True)
    options = ["--epochs", str(EPOCHS), "--seed", str(seed), "--log-every", "0", "--checkpoint-every", str(EPOCHS)]
    ground.run(("bash", str(plan / "launch.sh"), *options, *OURS[way][1], "--run-dir", str(run_dir)))
    epochs = json.loads((run_dir / "summary.json").read_text())["epochs"]
    curves = ([float(one[key]) for one in epochs] for key in ("loss", "test_accuracy"))
    return Run(link, way, seed, epoch_seconds(run_dir / "metrics"), *curves)


def write_plan(way: str, link: str, folder: Path, plan: Path) -> None:
    """Profile the model for the way's minibatch, and solve for two stages on the link."""
    options = OURS[way][0]
    minibatch = peers_jobs.DIGITS_BATCH // (4 if "--accumulate" in options else 1)
    profile, cluster = folder / f"profile-{minibatch}.json", folder / "cluster.toml"
    if not profile.exists():
        job = f"{peers_jobs.__file__}:{SUBJECT}"
        pipeplan("profile", job, "--batch", minibatch, "--repeats", 5, "-o", profile)
    where: tuple[object, ...] = ("--cluster", "local", "--workers", 2)
    if link != "none":
        cluster.write_text(TWO_SERVERS.format(rate=LINKS[link]))
        where = ("--cluster", cluster)
    pipeplan("solve", profile, *where, "--stages", 2, "--no-recompute", *options, "-o", plan)


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
    """The runs in a file, which makes those that are missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.runs = [Run(**json.loads(line)) for line in lines]

    def has(self, link: str, way: str, seed: int) -> bool:
        """Whether the file has a run."""
        return any((run.link, run.way, run.seed) == (link, way, seed) for run in self.runs)

    def add(self, run: Run) -> None:
        """Add a run to the file."""
        self.runs.append(run)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")


def measure(results: Results, link: str, seeds: int) -> None:
    """Make all runs over a link that are missing."""
    peers_run.LIMIT_S = LIMIT_S
    with tempfile.TemporaryDirectory() as scratch:
        ground: Ground = Here() if link == "none" else Shaped(link)
        for seed in range(seeds):
            for way in (*THEIRS, *OURS):
                if not results.has(link, way, seed):
                    train = train_theirs if way in THEIRS else train_ours
                    results.add(train(ground, way, link, seed, Path(scratch)))
                    print(f"{link}, {way}, seed {seed}: {results.runs[-1].goal_s} s", file=sys.stderr, flush=True)


def table(runs: Sequence[Run]) -> str:
    """A Markdown table: epochs, their time, and seconds to the goal, over the seeds that reach it.

    Under `fastest synchronous way` and `DDP` are their seconds to the goal over those of the row.
    """
    heads = "link | way | seeds | epochs | s per epoch | s to the goal | fastest synchronous way | DDP | accuracy %"
    rows = [f"| {heads} |", "|" + "---|" * 9]
    for link in LINKS:
        here = [run for run in runs if run.link == link]
        means = {
            way: statistics.fmean(run.goal_s or 0 for run in same)
            for way in (*THEIRS, *OURS)
            if (same := [run for run in here if run.way == way and run.goal_s])
        }
        for way, mean in means.items():
            same = [run for run in here if run.way == way]
            there = [run for run in same if run.goal_s]
            epochs = spread([run.epochs or 0 for run in there], ".1f")
            each = spread([second for run in same for second in run.seconds], ".2f")
            synchronous = min((means[one] for one in SYNCHRONOUS if one in means), default=mean)
            ratios = f"{synchronous / mean:.2f} | {means.get('DDP', mean) / mean:.2f}"
            seconds = spread([run.goal_s or 0 for run in there], ".1f")
            right = spread([100 * (run.goal_accuracy or 0) for run in there], ".1f")
            row = f"{link} | {way} | {len(there)} of {len(same)} | {epochs} | {each} | {seconds} | {ratios} | {right}"
            rows.append(f"| {row} |")
    return "\n".join(rows)


def spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):{form}} ± {deviation:{form}}"


def inside() -> int:
    """Run this command in a network namespace of its own; returns the exit status."""
    network = ("unshare", "-Urnm")
    if not shutil.which(network[0]) or subprocess.run((*network, "true"), check=False).returncode:
        print(f"skipped: this machine does not let us make network namespaces ({' '.join(network)})", file=sys.stderr)
        return 0
    return subprocess.run((*network, sys.executable, *sys.argv), env=os.environ | {INSIDE: "1"}, check=False).returncode


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
                arguments = [str(given.file), "--links", link, "--seeds", str(given.seeds)]
                sys.argv[1:] = arguments
                if status := inside():
                    return status
            else:
                measure(Results(given.file), link, given.seeds)
    if not os.environ.get(INSIDE):
        print(table(Results(given.file).runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Table 1's column of time to accuracy in small: three models, three workers over links as slow as the paper's.

    python tests/benchmarks/table1_in_small.py FILE [--rows vgg,gnmt,awd-lm] [--seeds 3] [--show]

The rows are those of Narayanan et al., SOSP 2019, Table 1: a network with most of its weights in fully connected
layers, on the scanned digits of scikit-learn, for VGG-16 (`digits36` of peers_sequences.py); a translation of names
for GNMT-16; a language model of LSTM layers for AWD-LM. Three workers train on servers of their own. The links are so
slow that an all-reduce of the weights takes so many times as long as computing a worker's share of an update as the
paper's epoch is shorter than that of data parallelism: with that ratio, an ideal pipeline has the paper's speed-up.
Every way makes an update of 36 samples, from the same initial weights, in the order of the seed, with AdamW at one
rate. The goal is a mean training loss over an epoch; seconds are those of training, without evaluations. The ways are
DistributedDataParallel (DDP); the paper's plan in small with weight stashing, as the paper trained, and with the
correction; and the same plan with a flush. The last row has a lower learning rate for all ways.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import peers_run
import peers_sequences
from goals import Results, Run, Training, spread
from peers_run import INSIDE, Shaped, cluster_file, in_own_network, pipeplan

WORKERS = 3
LIMIT_S = 1200.0
DDP = "DDP"
FLUSH = "1f1b-flush"
WAYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "stashing": ("1f1b-stashing", ()),
    "stashing, corrected": ("1f1b-stashing", ("--correction", "ef")),
    FLUSH: (FLUSH, ()),
}
"""The schedule, and options of launch.sh, by way."""


@dataclass(frozen=True)
class Row:
    """A row of the paper's table, and what stands for it here."""

    paper: str
    job: str
    """A function of peers_sequences.py."""
    plan: tuple[object, ...]
    """Options of `solve` that ask for the paper's plan in small."""
    replicas: str
    """The replicas of that plan's stages."""
    epoch_gain: float
    """The paper's time for an epoch of data parallelism over its own."""
    goal_gain: float
    """The paper's time to accuracy of data parallelism over its own."""
    goal: float
    epochs: int


STRAIGHT = ("--max-replicas", 1, "--stages", WORKERS)
ROWS: Mapping[str, Row] = {
    "vgg": Row("VGG-16 4x4, 15-1", "digits36", ("--stages", 2), "2-1", 5.28, 5.28, 0.1, 8),
    "gnmt": Row("GNMT-16 1x4, straight", "translation", STRAIGHT, "1-1-1", 1.46, 2.2, 0.8, 10),
    "awd-lm": Row("AWD-LM 1x4, straight", "language", STRAIGHT, "1-1-1", 4.25, 4.25, 1.75, 8),
    "awd-lm-low": Row("AWD-LM, a quarter of the rate", "language_low", STRAIGHT, "1-1-1", 4.25, 4.25, 2.2, 16),
}


def link_rate(profile: Path, gain: float) -> float:
    """Bytes/s at which a ring all-reduce of the weights takes `gain` times the computing of the profile's minibatch.

    A ring sends and receives 2 (R - 1) / R times the weights at every worker (Patarasuk and Yuan, 2009).
    """
    layers = json.loads(profile.read_text())["layers"]
    compute_s = sum(layer["forward_s"] + layer["backward_s"] for layer in layers)
    weights = sum(layer["parameter_bytes"] for layer in layers)
    return 2 * (WORKERS - 1) / WORKERS * weights / (gain * compute_s)


def measure(results: Results, name: str, seeds: int) -> None:
    """Make all runs of a row that are missing."""
    row, batch = ROWS[name], peers_sequences.SEQUENCES_BATCH
    peers_run.LIMIT_S = LIMIT_S
    training = Training(f"{peers_sequences.__file__}:{row.job}", batch, row.goal, row.epochs, WORKERS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        share = profiled(training.job, batch // WORKERS, folder)
        rate_mbit = round(link_rate(share, row.epoch_gain) * 8e-6, 1)
        ground = Shaped(f"{rate_mbit}mbit", WORKERS)
        cluster = folder / "cluster.toml"
        cluster.write_text(cluster_file(f"{rate_mbit} Mbit/s", WORKERS))
        print(f"{name}: links of {rate_mbit:g} Mbit/s", file=sys.stderr)
        for seed in range(seeds):
            for way in (DDP, *WAYS):
                if results.has(name, way, seed):
                    continue
                if way == DDP:
                    curves = training.with_torch(ground, "ddp:1", seed, folder)
                else:
                    plan = planned(row, way, training.job, cluster, folder)
                    curves = training.with_plan(ground, plan, seed, WAYS[way][1])
                results.add(Run(name, way, seed, curves))
                found = f"{curves.epochs(row.goal)} epochs, {curves.goal_s(row.goal)} s"
                print(f"{name}, {way}, seed {seed}: {found}", file=sys.stderr, flush=True)


def profiled(job: str, minibatch: int, folder: Path) -> Path:
    """The profile of a minibatch size, measured once."""
    profile = folder / f"profile-{minibatch}.json"
    if not profile.exists():
        pipeplan("profile", job, "--batch", minibatch, "--repeats", 5, "-o", profile)
    return profile


def planned(row: Row, way: str, job: str, cluster: Path, folder: Path) -> Path:
    """The plan folder of a way, made once."""
    plan = folder / f"plan-{list(WAYS).index(way)}"
    if plan.exists():
        return plan
    batch = peers_sequences.SEQUENCES_BATCH
    minibatches = 4 if way == FLUSH else max(map(int, row.replicas.split("-")))
    profile = profiled(job, batch // minibatches, folder)
    shape = (*row.plan, "--no-recompute", "--schedule", WAYS[way][0])
    sizes = ("--microbatch", batch // minibatches, *(("--batch", batch) if way == FLUSH else ()))
    pipeplan("solve", profile, "--cluster", cluster, *shape, *sizes, "-o", plan)
    stages = json.loads((plan / "plan.json").read_text())["plan"]["stages"]
    found = "-".join(str(len(stage["workers"])) for stage in stages)
    if found != row.replicas:
        raise RuntimeError(f"{row.paper}: the plan is {found} instead of {row.replicas}")
    return plan


def table(results: Results) -> str:
    """A Markdown table; `epoch` and `goal` are how many times faster than DDP, here and in the paper."""
    heads = "row | way | epochs | s per epoch | s to the goal | epoch | paper | goal | paper | accuracy %"
    lines = [f"| {heads} |", "|" + "---|" * 10]
    for name, row in ROWS.items():
        reference = results.of(name, DDP)
        for way in (DDP, *WAYS):
            same = results.of(name, way)
            there = [run for run in same if run.goal_s(row.goal)]
            if not same:
                continue
            each = [second for run in same for second in run.seconds]
            gain = statistics.fmean(second for run in reference for second in run.seconds) / statistics.fmean(each)
            seconds = [run.goal_s(row.goal) or 0 for run in there]
            slow = [run.goal_s(row.goal) or 0 for run in reference if run.goal_s(row.goal)]
            cells = (
                row.paper,
                way,
                spread([run.epochs(row.goal) or 0 for run in there], ".1f") + f" ({len(there)} of {len(same)})",
                spread(each, ".2f"),
                spread(seconds, ".1f"),
                f"{gain:.2f}",
                f"{row.epoch_gain}",
                f"{statistics.fmean(slow) / statistics.fmean(seconds):.2f}" if slow and seconds else "–",
                f"{row.goal_gain}",
                spread([100 * (run.goal_accuracy(row.goal) or 0) for run in there], ".1f"),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Make the runs that are missing and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="print the table only")
    given = parser.parse_args()
    rows = given.rows.split(",")
    if unknown := set(rows) - set(ROWS):
        parser.error(f"there is no row {unknown.pop()!r}: choose among {', '.join(ROWS)}")
    for name in () if given.show else rows:
        if os.environ.get(INSIDE):
            measure(Results(given.file), name, given.seeds)
        elif status := in_own_network([str(given.file), "--rows", name, "--seeds", str(given.seeds)]):
            return status
    if not os.environ.get(INSIDE):
        print(table(Results(given.file)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import peers_jobs
import peers_run
from goals import Results, Run, Training, spread
from peers_run import INSIDE, Ground, Here, Shaped, cluster_file, in_own_network, pipeplan

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


def write_plan(way: str, link: str, folder: Path, plan: Path) -> None:
    """Profile the model for the way's minibatch, and solve for two stages on the link."""
    schedule, batch = OURS[way][0], peers_jobs.DIGITS_BATCH
    minibatch = batch if schedule == "1f1b-stashing" else batch // 4
    profile, cluster = folder / f"profile-{minibatch}.json", folder / "cluster.toml"
    if not profile.exists():
        job = f"{peers_jobs.__file__}:{SUBJECT}"
        pipeplan("profile", job, "--batch", minibatch, "--repeats", 5, "-o", profile)
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
    training = Training(f"{peers_jobs.__file__}:{SUBJECT}", peers_jobs.DIGITS_BATCH, GOAL, EPOCHS, peers_run.WORKERS)
    with tempfile.TemporaryDirectory() as scratch:
        ground: Ground = Here() if link == "none" else Shaped(link)
        for seed in range(seeds):
            for way in (*THEIRS, *OURS):
                if results.has(link, way, seed):
                    continue
                if way in THEIRS:
                    curves = training.with_torch(ground, THEIRS[way], seed, Path(scratch))
                else:
                    plan = Path(scratch, way.replace(" ", "-").replace(",", ""))
                    if not plan.exists():
                        write_plan(way, link, Path(scratch), plan)
                    curves = training.with_plan(ground, plan, seed, OURS[way][1])
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

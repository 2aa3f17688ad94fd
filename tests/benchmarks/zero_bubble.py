"""zb-h1 beside 1f1b-flush: pace, waits and memory on this machine, with the same stages.

    python tests/benchmarks/zero_bubble.py [--model gpt] [--workers 2] [--batch 2] [--accumulate 4] [--runs 3]

Profiles a model of `peers_jobs`, plans it as a straight pipeline with both schedules, and trains in turn. Times of one
run and the next can be compared, those of different machines cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from memory import MIB, PIPEPLAN, call
from rich.console import Console
from rich.table import Table

SCHEDULES = ("1f1b-flush", "zb-h1")
Runs = dict[str, list[dict[str, Any]]]


def measure(folder: Path, given: argparse.Namespace) -> Runs:
    """The summaries of the runs, by schedule."""
    profile, runs = given.profile or folder / "profile.json", Runs()
    count = str(given.workers)
    if given.profile is None:
        call(*PIPEPLAN, "profile", f"peers_jobs:{given.model}", "--batch", str(given.batch), "-o", profile)
    straight = ["--cluster", "local", "--workers", count, "--stages", count]
    straight += ["--microbatch", str(given.batch), "--batch", str(given.batch * given.accumulate)]
    for name in SCHEDULES:
        call(*PIPEPLAN, "solve", profile, *straight, "--schedule", name, "-o", folder / name)
    few = ["--epochs", "1", "--log-every", "0", "--max-minibatches", str(given.minibatches)]
    for number in range(given.runs):
        for name in SCHEDULES:
            run = folder / f"{name}-{number}"
            call(folder / name / "launch.sh", *few, "--run-dir", run)
            runs.setdefault(name, []).append(json.loads((run / "summary.json").read_text()))
    return runs


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--profile", type=Path, help="a profile of the model, instead of measuring one")
    for name, value in (("workers", 2), ("batch", 2), ("accumulate", 4), ("runs", 3), ("minibatches", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.environ["OMP_NUM_THREADS"] = "1"
    table = Table("schedule", "ms per minibatch, each run", "waits of the stages, ms", "MiB measured (predicted)")
    with tempfile.TemporaryDirectory() as scratch:
        runs = measure(Path(scratch), given)
    for name, found in runs.items():
        paces = [1e3 * one["minibatch_s"]["measured"] for one in found]
        stages = list(zip(*(one["stages"] for one in found), strict=True))
        waits = [statistics.median(1e3 * one["wait_s"]["measured"] for one in stage) for stage in stages]
        memory = [max((one["memory_bytes"] for one in stage), key=lambda one: one["measured"]) for stage in stages]
        sizes = [f"{one['measured'] / MIB:.0f} ({one['predicted'] / MIB:.0f})" for one in memory]
        cells = [[f"{value:.0f}" for value in values] for values in (paces, waits)]
        table.add_row(name, *(", ".join(cell) for cell in (*cells, sizes)))
    Console().print(table)
    flush, zero = ([one["minibatch_s"]["measured"] for one in runs[name]] for name in SCHEDULES)
    ratios = [ours / theirs for ours, theirs in zip(zero, flush, strict=True)]
    print(f"zb-h1 over 1f1b-flush, run by run: {', '.join(f'{one:.2f}' for one in ratios)}")
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()

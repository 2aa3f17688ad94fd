"""Peak memory of every worker against the planner's figure, for a model of large layers on this machine.

    python tests/benchmarks/memory.py [--model alexnet] [--batch 16] [--minibatches 16]

Profiles the model, solves for two workers and two stages with several schedules, and trains a few minibatches. The
measured figure is what the stage added to its process at its peak, code that is loaded at first use included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PIPEPLAN = [sys.executable, "-m", "pipeplan"]
SCHEDULES: dict[str, list[str]] = {
    "1f1b-stashing": [],
    "vertical-sync": [],
    "2bw": ["--accumulate", "4"],
    "1f1b-flush": ["--accumulate", "4"],
    "gpipe": ["--accumulate", "3"],
}
AIM = 0.10
MIB = 2**20


def call(*arguments: str | Path) -> None:
    """Run a command; its output is shown only if it fails."""
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} failed:\n{done.stdout}{done.stderr}")


def measure(folder: Path, profile: Path, schedule: str, minibatches: int) -> list[dict[str, Any]]:
    """The stages of the summary of a run."""
    plan = folder / schedule
    options = ["--cluster", "local", "--workers", "2", "--stages", "2", "--schedule", schedule, *SCHEDULES[schedule]]
    call(*PIPEPLAN, "solve", profile, *options, "-o", plan)
    few = ["--epochs", "1", "--max-minibatches", str(minibatches), "--log-every", "0"]
    call(plan / "launch.sh", *few, "--run-dir", folder / f"{schedule}-run")
    stages: list[dict[str, Any]] = json.loads((folder / f"{schedule}-run" / "summary.json").read_text())["stages"]
    return stages


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--batch", default="16")
    parser.add_argument("--minibatches", type=int, default=16)
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=list(SCHEDULES))
    given = parser.parse_args()
    table = Table("schedule", "stage", "predicted MiB", "measured MiB", "ratio", f"aim {1 + AIM:.2f}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        call(*PIPEPLAN, "profile", given.model, "--batch", given.batch, "-o", folder / "profile.json")
        for schedule in given.schedules:
            for stage in measure(folder, folder / "profile.json", schedule, given.minibatches):
                memory = stage["memory_bytes"]
                good = "yes" if abs(memory["ratio"] - 1) <= AIM else "no"
                cells = [f"{memory[key] / MIB:.0f}" for key in ("predicted", "measured")]
                table.add_row(schedule, str(stage["stage"]), *cells, f"{memory['ratio']:.2f}", good)
    Console().print(table)


if __name__ == "__main__":
    main()

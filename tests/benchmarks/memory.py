"""Peak memory of every worker against the planner's figure, for several models on this machine.

    python tests/benchmarks/memory.py [--only NAME ...] [--schedules NAME ...] [--minibatches N]

Profiles each model, solves for straight plans on local workers, and trains N minibatches (16). The prediction includes
a worker without a model and what the allocator takes, as measured on this machine. The measured figure is that worker
and what training added to the process at its peak; neither counts the data set, or code that is loaded at first use.
The last line has the range of all ratios, whose aim is 0.95 to 1.10. Memory hardly depends on other programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PIPEPLAN = [sys.executable, "-m", "pipeplan"]
SCHEDULES = {"1f1b-stashing": 0, "vertical-sync": 0, "2bw": 4, "1f1b-flush": 4, "gpipe": 3}
"""Minibatches per update, where the schedule takes a number."""
AIM = 0.95, 1.10
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A model, and the number of stages of its plan, each on one worker."""

    ref: str
    stages: int = 2
    profile: tuple[str, ...] = ()
    """Further options of `pipeplan profile`."""


CASES = {
    "readme": Case("mnist", 3),
    "init": Case(f"{HERE.parents[1] / 'templates' / 'init' / 'job.py'}:build"),
    "mlp": Case(f"{HERE / 'prediction_jobs.py'}:mlp"),
    "resnet": Case(f"{HERE / 'prediction_jobs.py'}:resnet"),
    "lstm": Case(f"{HERE / 'prediction_jobs.py'}:lstm"),
    "alexnet": Case("alexnet", profile=("--microbatch", "16")),
}


def call(*arguments: str | Path) -> None:
    """Run a command; its output is shown only if it fails."""
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} failed:\n{done.stdout}{done.stderr}")


def measure(folder: Path, case: Case, schedule: str, minibatches: int) -> list[dict[str, Any]]:
    """The stages of the summary of a run. The profile is made once."""
    folder.mkdir(exist_ok=True)
    profile, plan, run = folder / "profile.json", folder / schedule, folder / f"{schedule}-run"
    if not profile.exists():
        call(*PIPEPLAN, "profile", case.ref, *case.profile, "-o", profile)
    workers = ["--cluster", "local", "--workers", str(case.stages), "--stages", str(case.stages)]
    minibatch = json.loads(profile.read_text())["minibatch"]
    straight = ["--max-replicas", "1", "--schedule", schedule, "--microbatch", str(minibatch)]
    if SCHEDULES[schedule]:
        straight += ["--batch", str(minibatch * SCHEDULES[schedule])]
    call(*PIPEPLAN, "solve", profile, *workers, *straight, "-o", plan)
    few = ["--epochs", "1", "--max-minibatches", str(minibatches), "--log-every", "0"]
    call(plan / "launch.sh", *few, "--run-dir", run)
    stages: list[dict[str, Any]] = json.loads((run / "summary.json").read_text())["stages"]
    return stages


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=["1f1b-stashing"])
    parser.add_argument("--minibatches", type=int, default=16)
    given = parser.parse_args()
    table = Table("model", "schedule", "stage", "predicted MiB", "measured MiB", "measured/predicted", "within the aim")
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.only:
            for schedule in given.schedules:
                for stage in measure(Path(scratch) / name, CASES[name], schedule, given.minibatches):
                    memory = stage["memory_bytes"]
                    ratios.append(memory["ratio"])
                    good = "yes" if AIM[0] <= memory["ratio"] <= AIM[1] else "no"
                    cells = [f"{memory[key] / MIB:.0f}" for key in ("predicted", "measured")]
                    table.add_row(name, schedule, str(stage["stage"]), *cells, f"{memory['ratio']:.2f}", good)
    Console().print(table)
    print(f"measured/predicted: {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()

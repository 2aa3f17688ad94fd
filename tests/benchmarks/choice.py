"""Whether the plan that `solve` chooses is the best of those that could be run: ResNet-18 on two local workers.

    python tests/benchmarks/choice.py [--seconds S] [--folder F]

The model is profiled at minibatch 32 and its halves. The default plan, and one plan of each kind (data parallelism,
synchronous pipelines with a flush, 2bw, stashing), all with 64 samples per update where a schedule has a choice, are
run one after another for about S predicted seconds each (60). Profiling and runs hold the lock
/tmp/pipeplan-measure.lock unless PIPEPLAN_LOCK names another file. The table has predicted and measured samples per
second.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

JOB = Path(__file__).parent / "choice_job.py"
BATCH = 64
PLANS = {
    "default": (),
    "default, no stale gradients": ("--staleness", "none"),
    "data parallelism": ("--stages", "1", "--schedule", "1f1b-stashing"),
    "1f1b-flush, 2 stages, 2 x 32": ("--stages", "2", "--schedule", "1f1b-flush", "--accumulate", "2"),
    "1f1b-flush, 2 stages, 4 x 16": (
        "--stages",
        "2",
        "--schedule",
        "1f1b-flush",
        "--accumulate",
        "4",
        "--minibatch",
        "16",
    ),
    "2bw, 2 stages, 4 x 16": ("--stages", "2", "--schedule", "2bw", "--accumulate", "4", "--minibatch", "16"),
    "1f1b-stashing, 2 stages": ("--stages", "2", "--schedule", "1f1b-stashing"),
}


@contextmanager
def alone() -> Iterator[None]:
    """Context in which nothing else measures that takes the same lock."""
    with open(os.environ.get("PIPEPLAN_LOCK", "/tmp/pipeplan-measure.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(folder: Path, *arguments: object) -> None:
    """Run a command. Raises `SystemExit` with its output where it fails."""
    command = [str(one) for one in arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stdout}{done.stderr}")


def measured(folder: Path, name: str, options: Sequence[str], seconds: float) -> str:
    """Solve and run one plan. Returns its line of the table."""
    plan = folder / name.replace(" ", "-").replace(",", "")
    pipeplan = (sys.executable, "-m", "pipeplan")
    run(
        folder,
        *pipeplan,
        "solve",
        "profile.json",
        "--cluster",
        "local",
        "--workers",
        2,
        *options,
        "-o",
        plan,
        "--force",
    )
    document = json.loads((plan / "plan.json").read_text())
    predicted = document["throughput"]["samples_per_s"]
    minibatches = max(20, round(seconds * document["prediction"]["minibatches_per_s"]))
    with alone():
        options = ("--epochs", "1", "--max-minibatches", str(minibatches), "--log-every", "0")
        run(folder, plan / "launch.sh", *options, "--run-dir", plan / "run")
    summary = json.loads((plan / "run" / "summary.json").read_text())
    found = document["profile"]["minibatch"] / summary["minibatch_s"]["measured"]
    config = (
        f"{document['plan']['config']}, {document['plan']['schedule']}, minibatch {document['profile']['minibatch']}"
    )
    return f"{name:<30} {config:<36} {predicted:>9.1f} {found:>9.1f} {predicted / found:>7.0%}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, help="keep the profile, plans and runs here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "profile.json").exists():
            with alone():
                run(folder, sys.executable, "-m", "pipeplan", "profile", f"{JOB}:build")
        print(f"{'plan':<30} {'':<36} predicted  measured  pred./meas. samples/s", flush=True)
        for name, options in PLANS.items():
            print(measured(folder, name, options, given.seconds), flush=True)


if __name__ == "__main__":
    main()

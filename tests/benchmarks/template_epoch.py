"""Whether the job file of `pipeplan init` learns in its first epoch as plain torch does, whichever schedule it runs.

    python tests/benchmarks/template_epoch.py [--seeds 5] [--workers 2]

Plain torch is an ordinary loop over the same samples in the same order. Plans have as many stages as workers, and
schedules that accumulate take one minibatch per update, so that all make as many updates. `default` is the plan that
`solve` gives without options. The table has the accuracy on the test set after one epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from learning import Task, one_process

PIPEPLAN = (sys.executable, "-m", "pipeplan")
MINIBATCH = 16
FOURS = ("--batch", "16", "--microbatch", "4")
WAYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "1f1b-flush": ("--schedule", "1f1b-flush", *FOURS),
    "2bw, corrected": ("--schedule", "2bw", *FOURS),
    "1f1b-stashing, corrected": ("--schedule", "1f1b-stashing", "--microbatch", "16"),
    "1f1b-stashing": ("--schedule", "1f1b-stashing", "--microbatch", "16"),
}
"""Options of `solve` by way."""
ALLOWED = 0.02
"""By how much a way may be below plain torch, as a share of the test samples."""


def call(folder: Path, *command: str) -> None:
    """Run a command in a folder. Raises `SystemExit` with what it says if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def after_one_epoch(folder: Path, plan: Path, seed: int) -> float:
    """The accuracy on the test set after one epoch of a plan."""
    run = folder / f"{plan.name}-{seed}"
    options = ["--epochs", "1", "--seed", str(seed), "--log-every", "0", "--run-dir", str(run)]
    options += ["--correction", "ef"] if plan.name.endswith("-corrected") else []
    call(folder, str(plan / "launch.sh"), *options)
    return float(json.loads((run / "summary.json").read_text())["epochs"][0]["test_accuracy"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        call(folder, *PIPEPLAN, "init")
        call(folder, *PIPEPLAN, "profile", "job.py:build", "-o", "profile.json")
        task = Task(f"{folder / 'job.py'}:build", MINIBATCH, 1, ())
        found = {"plain torch": [one_process(task, seed).accuracy[0] for seed in range(given.seeds)]}
        for name, options in WAYS.items():
            plan = folder / name.replace(", ", "-")
            where = ("--cluster", "local", "--workers", str(given.workers))
            straight = () if name == "default" else ("--stages", str(given.workers))
            call(folder, *PIPEPLAN, "solve", "profile.json", *where, *straight, *options, "-o", str(plan))
            found[name] = [after_one_epoch(folder, plan, seed) for seed in range(given.seeds)]
    plain = statistics.fmean(found["plain torch"])
    print("| way | accuracy %, mean ± deviation | beside plain torch, points |\n|---|---|---|")
    for name, values in found.items():
        mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        verdict = "" if mean >= plain - ALLOWED else " (more than allowed)"
        print(f"| {name} | {100 * mean:.1f} ± {100 * deviation:.1f} | {100 * (mean - plain):+.1f}{verdict} |")


if __name__ == "__main__":
    main()

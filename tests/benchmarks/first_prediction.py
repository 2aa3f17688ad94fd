"""How near the first prediction that a user sees is to the run: small models, of a few milliseconds a minibatch.

    python tests/benchmarks/first_prediction.py [--only NAME] [--runs N] [--folder F]

`readme` is the README's main job (three local workers, the plan that is best without the executor's costs: three
stages), `init` the template of `pipeplan init` on two workers; three small models follow with a plan of one worker, two
and three stages each. Every model is profiled by itself, and the executor's costs are measured unless they are known.
Profile, plan and run are made N times (3) one after the other, so that a machine whose speed changes within minutes has
the same speed in a prediction and in its run, and the median counts. The table has predicted over measured minibatches
per second. The processor's load average is printed with it: on a machine that others use the measured paces are theirs
as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JOBS = HERE / "first_prediction_jobs.py"
LEAST_MINIBATCHES = 900


@dataclass(frozen=True)
class Case:
    """A model and the number of stages of its plan, each on one worker."""

    name: str
    ref: str
    stages: int
    epoch: int
    """Minibatches of an epoch."""


CASES = [
    Case("readme", "mnist", 3, 45),
    Case("init", f"{ROOT / 'templates' / 'init' / 'job.py'}:build", 2, 1024),
    *(
        Case(name, f"{JOBS}:{name}", stages, 64)
        for name in ("mlp", "convolutions", "attention")
        for stages in (1, 2, 3)
    ),
]


def run(*arguments: object, folder: Path) -> None:
    """Run a command. Raises `SystemExit` with its output where it fails."""
    done = subprocess.run([str(one) for one in arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments}: {done.stdout}{done.stderr}")


def paces(case: Case, folder: Path) -> tuple[float, float]:
    """Predicted and measured seconds per minibatch of the best plan with so many stages."""
    pipeplan = [sys.executable, "-m", "pipeplan"]
    profile, plan = folder / f"{case.name}-{case.stages}.json", folder / f"{case.name}-{case.stages}"
    run(*pipeplan, "profile", case.ref, "--force", "-o", profile, folder=folder)
    limits = ["--stages", case.stages, "--max-replicas", 1, "--force", "-o", plan]
    run(*pipeplan, "solve", profile, "--cluster", "local", "--workers", case.stages, *limits, folder=folder)
    epochs = -(-LEAST_MINIBATCHES // case.epoch)
    run(plan / "launch.sh", "--epochs", epochs, folder=folder)
    latest = max((plan / "runs").glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    summary = json.loads(latest.read_text())["minibatch_s"]
    return float(summary["predicted"]), float(summary["measured"])


def table(cases: Sequence[Case], folder: Path, runs: int) -> None:
    """Run all cases and print a line for each."""
    print(f"{'model':<14}{'stages':>6}{'predicted':>11}{'measured':>10}  minibatches/s   predicted/measured, range")
    for case in cases:
        found = [paces(case, folder) for _ in range(runs)]
        predicted_s, measured_s = (statistics.median(one) for one in zip(*found, strict=True))
        ratios = sorted(measured / predicted for predicted, measured in found)
        print(
            f"{case.name:<14}{case.stages:>6}{1 / predicted_s:>11.1f}{1 / measured_s:>10.1f}"
            f"{statistics.median(ratios):>31.0%}  {ratios[0]:.0%}-{ratios[-1]:.0%}  load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only this model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep profiles, plans and runs here")
    given = parser.parse_args()
    cases = [case for case in CASES if given.only in (None, case.name)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        table(cases, folder.absolute(), given.runs)


if __name__ == "__main__":
    main()

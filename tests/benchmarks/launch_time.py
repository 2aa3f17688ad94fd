"""How long a launch takes until its first minibatch is done, beyond importing torch.

    python tests/benchmarks/launch_time.py [--workers N] [--repeats N]

The bundled `mnist` as a straight pipeline of N stages, by launch.sh: from its start until the last stage has finished
minibatch 0. Beside it, in turn: torchrun itself, with as many workers that do nothing but import torch, until the last
of them has. The difference is what the executor adds: reading the plan, meeting, the user's model and data, tracing,
cutting, comparing, connecting, and a minibatch through all stages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MOST_S = 3.0
IMPORTS = (
    "import pathlib, os, time, torch; pathlib.Path(os.environ['DONE'], os.environ['RANK']).write_text(str(time.time()))"
)


def make_plan(folder: Path, workers: int) -> Path:
    """Profile and solve."""
    pipeplan = [sys.executable, "-m", "pipeplan"]
    profile, plan = folder / "mnist.json", folder / "plan"
    limits = ["--workers", str(workers), "--stages", str(workers), "--max-replicas", "1"]
    for command in (
        [*pipeplan, "profile", "mnist", "--microbatch", "32", "-o", str(profile)],
        [*pipeplan, "solve", str(profile), "--cluster", "local", *limits, "-o", str(plan)],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return plan


def first_minibatch_s(plan: Path, run: Path) -> float:
    """Seconds from the start of launch.sh to the first minibatch that the last stage finished."""
    began = time.time()
    options = ["--run-dir", str(run), "--epochs", "1", "--max-minibatches", "4", "--log-every", "0"]
    subprocess.run([plan / "launch.sh", *options], check=True, capture_output=True)
    lines = [json.loads(path.read_text().splitlines()[0]) for path in (run / "metrics").iterdir()]
    last = max(lines, key=lambda line: int(line["stage"]))
    return float(last["time_s"]) - began


def imported_s(workers: int, folder: Path) -> float:
    """Seconds until so many workers of torchrun have imported torch."""
    folder.mkdir()
    script = folder / "imports.py"
    script.write_text(IMPORTS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    began = time.time()
    subprocess.run(
        [*torchrun, script],
        check=True,
        capture_output=True,
        env=os.environ | {"DONE": str(folder), "OMP_NUM_THREADS": "1"},
    )
    return max(float(path.read_text()) for path in folder.iterdir() if path != script) - began


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    launches, imports = [], []
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder), given.workers)
        for turn in range(given.repeats):
            launches.append(first_minibatch_s(plan, Path(folder) / f"run-{turn}"))
            imports.append(imported_s(given.workers, Path(folder) / f"imports-{turn}"))
    beyond = [launch - imported for launch, imported in zip(launches, imports, strict=True)]
    print(f"{given.workers} workers: first minibatch after {statistics.median(launches):.2f} s,", end=" ")
    print(f"torch imported by all of torchrun's after {statistics.median(imports):.2f} s;", end=" ")
    print(f"beyond that {statistics.median(beyond):.2f} s ({min(beyond):.2f}-{max(beyond):.2f}), at most {MOST_S:g} s")


if __name__ == "__main__":
    main()

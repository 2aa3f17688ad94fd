"""Memory and time of an update with the optimiser whole and in parts, for replicas of one stage and AdamW, on the CPU.

    python tests/benchmarks/optimizer_shards.py [--replicas 3] [--width 2048] [--layers 6] [--updates 4]

Profiles a chain of square linear layers, solves for that many replicas of one stage, with and without
--shard-optimizer, and trains. Beside the planner's figures are the largest measured memory of a worker, its own base
included, and the median time of an update.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PIPEPLAN = [sys.executable, "-m", "pipeplan"]
MIB = 2**20
BATCH = 256
"""Samples of a minibatch: enough that the fastest plan has replicas."""
CLUSTER = """
format = "pipeplan-cluster"
version = 1
name = "replicas"

[device]
name = "one core"
kind = "cpu"
memory = "8 GiB"

[[level]]
name = "machine"
count = {replicas}
bandwidth = "100 GB/s"
"""
JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from pipeplan_launch import Data, Job


def job():
    model = nn.Sequential(*(nn.Linear({width}, {width}) for _ in range({layers})))
    data = TensorDataset(torch.randn({samples}, {width}), torch.randn({samples}, {width}))
    return Job(model, loss=nn.functional.mse_loss, data=lambda: Data(data), optimizer=lambda p: torch.optim.AdamW(p))
"""


def call(folder: Path, *arguments: str | Path) -> None:
    """Run a command in a folder; its output is shown only if it fails."""
    done = subprocess.run([*map(str, arguments)], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))} failed:\n{done.stdout}{done.stderr}")


def measure(folder: Path, plan: str, updates: int, replicas: int) -> tuple[float, float, float]:
    """(predicted bytes, largest measured bytes of a worker, median seconds of an update)."""
    run = folder / f"run of {plan}"
    few = ["--epochs", "1", "--max-minibatches", str(updates * replicas), "--log-every", "0", "--threads", "1"]
    call(folder, folder / plan / "launch.sh", *few, "--run-dir", run)
    (stage,) = json.loads((run / "summary.json").read_text())["stages"]
    memory: dict[str, Any] = stage["memory_bytes"]
    lines = [line for path in (run / "metrics").glob("rank-*.jsonl") for line in path.read_text().splitlines()]
    times = [step["update_s"] for step in map(json.loads, lines) if step.get("update_s")]
    return memory["predicted"], memory["measured"], statistics.median(times)


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--updates", type=int, default=4)
    given = parser.parse_args()
    samples = BATCH * given.replicas * given.updates
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "wide.py").write_text(JOB.format(width=given.width, layers=given.layers, samples=samples))
        call(
            folder, *PIPEPLAN, "profile", "wide.py:job", "--batch", str(BATCH), "--halvings", "0", "-o", "profile.json"
        )
        # A cluster file without shared cores makes the plan with all replicas the fastest one.
        (folder / "cluster.toml").write_text(CLUSTER.format(replicas=given.replicas), encoding="utf-8")
        stage = ["--cluster", "cluster.toml", "--stages", "1", "--solver", "dp"]
        for plan, options in (("whole", []), ("in parts", ["--shard-optimizer"])):
            solve = ["solve", "profile.json", *stage, "--schedule", "1f1b-stashing", *options, "-o", plan]
            call(folder, *PIPEPLAN, *solve)
            (planned,) = json.loads((folder / plan / "stages" / "stage-0.json").read_text())["pipeline"]
            if (count := len(planned["workers"])) != given.replicas:
                sys.exit(f"the fastest plan has {count} replicas, not {given.replicas}: give a larger model")
            predicted, measured, update_s = measure(folder, plan, given.updates, given.replicas)
            print(
                f"{plan:9} predicted {predicted / MIB:5.0f} MiB, measured {measured / MIB:5.0f} MiB "
                f"({measured / predicted:.2f}), update {1e3 * update_s:.0f} ms"
            )


if __name__ == "__main__":
    main()

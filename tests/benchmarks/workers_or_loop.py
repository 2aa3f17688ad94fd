"""The README's job on one, two and three workers beside one plain loop in a single process.

    python tests/benchmarks/workers_or_loop.py [--turns 3] [--minibatches 900] [--folder F]

The plain loop is what a user writes without pipeplan: one thread, the same model, samples, optimiser and minibatch. The
sides take turns; the table has the median of the turns, in minibatches per second, and the smallest and the largest.
Both leave out the beginning: the loop a tenth of its minibatches, a pipeline the fill of every epoch.
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

JOB = "mnist"
WORKERS = (1, 2, 3)
LEFT_OUT = 10


def plain_loop(minibatches: int) -> float:
    """Minibatches per second of one process."""
    import torch
    from torch.utils.data import TensorDataset

    from pipeplan_launch.job.loading import load_job

    torch.set_num_threads(1)
    job = load_job(JOB, seed=0)
    assert job.data is not None
    assert job.loss is not None
    assert callable(job.optimizer)
    train = job.data().train
    assert isinstance(train, TensorDataset)
    samples, targets = train.tensors
    optimizer = job.optimizer(list(job.model.parameters()))
    begun, size = 0.0, job.minibatch
    for number in range(minibatches):
        if number == minibatches // LEFT_OUT:
            begun = time.perf_counter()
        rows = torch.randint(len(samples), (size,))
        optimizer.zero_grad()
        loss = job.loss(job.model(samples[rows]), targets[rows])
        loss.backward()
        optimizer.step()
        loss.item()
    return (minibatches - minibatches // LEFT_OUT) / (time.perf_counter() - begun)


def call(*command: object, folder: Path) -> str:
    """The output of a command. Raises `SystemExit` with it where the command fails."""
    done = subprocess.run([str(one) for one in command], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stdout}{done.stderr}")
    return done.stdout


def launch(workers: int, turn: int, minibatches: int, folder: Path) -> float:
    """Minibatches per second of the best plan with a stage on each of so many workers."""
    plan = folder / f"plan-{workers}"
    if not plan.exists():
        shape = ["--workers", workers, "--stages", workers, "--max-replicas", 1]
        call(
            sys.executable,
            "-m",
            "pipeplan",
            "solve",
            "profile.json",
            "--cluster",
            "local",
            *shape,
            "-o",
            plan,
            folder=folder,
        )
    run = plan / "runs" / str(turn)
    call(plan / "launch.sh", "--epochs", -(-minibatches // 45), "--run-dir", run, folder=folder)
    return 1 / float(json.loads((run / "summary.json").read_text())["minibatch_s"]["measured"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--minibatches", type=int, default=900)
    parser.add_argument("--folder", type=Path, help="keep profile, plans and runs here")
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.loop:
        print(plain_loop(given.minibatches))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        call(sys.executable, "-m", "pipeplan", "profile", JOB, "-o", "profile.json", "--force", folder=folder)
        rates: dict[str, list[float]] = {}
        for turn in range(given.turns):
            loop = call(sys.executable, Path(__file__), "--loop", "--minibatches", given.minibatches, folder=folder)
            rates.setdefault("plain loop", []).append(float(loop))
            for workers in WORKERS:
                rates.setdefault(f"{workers} workers", []).append(launch(workers, turn, given.minibatches, folder))
    first = statistics.median(rates["plain loop"])
    print(f"{'':<12}{'minibatches/s':>14}{'of the loop':>13}  range         load {os.getloadavg()[0]:.1f}")
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"{name:<12}{middle:>14.0f}{middle / first:>13.0%}  {min(found):.0f}-{max(found):.0f}")


if __name__ == "__main__":
    main()

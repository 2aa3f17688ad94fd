"""What one training step of each bundled model takes in its full size: time, and memory at the peak.

    python tests/benchmarks/bundled_models.py [MODEL …] [--batch N] [--steps N]

Forward, loss, backward and the optimiser's step on the model's own minibatch size, in one process for each model, on
all cores. The step is the first one unless --steps asks for more; then it is the median of those after the first. The
memory is what training adds to the process, weights, gradients and the optimiser's state included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from pipeplan_launch.job.bundled_models import BUNDLED

GIB = 1024**3


def measure(name: str, batch: int | None, steps: int) -> dict[str, float]:
    """Seconds and bytes of one model, in this process."""
    from pipeplan_launch import load_job
    from pipeplan_launch.telemetry.memory import resident_bytes, resident_memory

    before = resident_bytes()
    job = load_job(name, seed=0)
    minibatch = batch or job.minibatch
    sample = job.example_batch(minibatch)
    optimizer = job.make_optimizer(list(job.model.parameters()))
    job.model.train()
    wall, cpu = [], []
    for _ in range(steps):
        began, own = time.perf_counter(), time.process_time()
        job.loss(job.model(*sample.inputs), sample.target).backward()  # type: ignore[misc]
        optimizer.step()
        optimizer.zero_grad()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - own)
    counted = slice(1, None) if steps > 1 else slice(None)
    return {
        "minibatch": minibatch,
        "wall_s": statistics.median(wall[counted]),
        "cpu_s": statistics.median(cpu[counted]),
        "peak_bytes": resident_memory().peak_bytes - before,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(BUNDLED), metavar="MODEL", help="default: all")
    parser.add_argument("--batch", type=int, help="samples in the minibatch; default: each model's own")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.in_process:
        print(json.dumps(measure(given.models[0], given.batch, given.steps)))
        return
    print(f"{'model':<12} {'minibatch':>9} {'step, s':>9} {'of CPU, s':>10} {'memory, GiB':>12} {'weights, MB':>12}")
    for name in given.models:
        options = ["--steps", str(given.steps), *(["--batch", str(given.batch)] if given.batch else [])]
        command = [sys.executable, __file__, name, "--in-process", *options]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            why = run.stderr.strip().splitlines()
            print(f"{name:<12} failed ({run.returncode}): {why[-1] if why else 'killed'}")
            continue
        found = json.loads(run.stdout)
        print(
            f"{name:<12} {found['minibatch']:>9} {found['wall_s']:>9.2f} {found['cpu_s']:>10.2f} "
            f"{found['peak_bytes'] / GIB:>12.2f} {BUNDLED[name]['parameters'] * 4 / 1e6:>12.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

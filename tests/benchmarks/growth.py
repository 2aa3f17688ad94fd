"""Whether file descriptors and memory of a long run grow.

    PYTHONPATH=tests/support python tests/benchmarks/growth.py [--minibatches 20000] [--samples 10] [--workers 3]

Profiles and plans the bundled `mnist` model and trains it in epochs of 40 minibatches, with a checkpoint every 20 and
an evaluation every tenth epoch. Printed are the largest number of open file descriptors and the largest resident memory
of the launcher and of its workers, at equal steps of the run. Status 1 if a later half of the run has more descriptors
than the first half, or more than 10% more memory than the end of the first half.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from signal import SIGTERM
from typing import NamedTuple

from faults import EPOCH, plan_mnist
from launching import Launch, last_step
from rich.console import Console
from rich.table import Table

OPTIONS = ("--epochs", "1000000", "--max-minibatches", str(EPOCH), "--log-every", "0")
OPTIONS += ("--checkpoint-minibatches", "20", "--evaluate-every", "10")
ALLOWED = 1.1
LOOKS, LOOK_S = 10, 0.05


class Use(NamedTuple):
    """What the processes of a launch hold."""

    minibatches: int
    launcher_files: int
    worker_files: int
    """Most of any worker."""
    launcher_bytes: int
    worker_bytes: int


def use_of(launch: Launch, minibatches: int) -> Use:
    """The present use."""
    workers = launch.workers().values()
    files, sizes = ([measure(pid) for pid in workers] for measure in (open_files, resident_bytes))
    own = launch.process.pid
    return Use(minibatches, open_files(own), max(files), resident_bytes(own), max(sizes))


def open_files(pid: int) -> int:
    """File descriptors of a process: the fewest of several looks, as writing a checkpoint takes some."""
    found = []
    for _ in range(LOOKS):
        found.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(LOOK_S)
    return min(found)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def measure(script: Path, run: Path, minibatches: int, samples: int) -> list[Use]:
    """The use at so many equal steps of a run."""
    found = []
    with Launch(script, run, *OPTIONS) as launch:
        for number in range(1, samples + 1):
            goal = minibatches * number // samples
            while (before := _done(run)) < goal:
                launch.until(lambda before=before: _done(run) > before, "progress")  # type: ignore[misc]
            found.append(use_of(launch, goal))
            print(found[-1], file=sys.stderr, flush=True)
        launch.process.send_signal(SIGTERM)
        launch.wait()
    return found


def grows(uses: list[Use]) -> bool:
    """Whether the second half of a run holds more than the first."""
    first, second = uses[: len(uses) // 2], uses[len(uses) // 2 :]
    for name in ("launcher_files", "worker_files"):
        if max(getattr(use, name) for use in second) > max(getattr(use, name) for use in first):
            return True
    return any(
        max(getattr(use, name) for use in second) > ALLOWED * getattr(first[-1], name)
        for name in ("launcher_bytes", "worker_bytes")
    )


def _done(run: Path) -> int:
    step = last_step(run)
    return 0 if step is None else int(step["epoch"] * EPOCH + step["minibatch"] + 1)


def main() -> int:
    """Print the table; the status is 0 if nothing grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatches", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--workers", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = plan_mnist(Path(folder), given.workers, given.workers)
        uses = measure(script, Path(folder) / "run", given.minibatches, given.samples)
    table = Table("minibatches", "files: launcher", "worker", "MiB: launcher", "worker")
    for use in uses:
        sizes = (f"{size / 2**20:.1f}" for size in (use.launcher_bytes, use.worker_bytes))
        table.add_row(f"{use.minibatches:,}", str(use.launcher_files), str(use.worker_files), *sizes)
    Console().print(table)
    return 1 if grows(uses) else 0


if __name__ == "__main__":
    sys.exit(main())

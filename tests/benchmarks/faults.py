"""kill -9 of random workers at random moments of one run: does it end, how fast is it back, and is the loss the same?

    PYTHONPATH=tests/support python tests/benchmarks/faults.py [--kills 20] [--workers 3] [--stages 3] [--seed 0]

Profiles and plans the bundled `mnist` model for this machine, trains it once without faults, then again while workers
are killed: most after a random number of minibatches, every fourth at a random moment of the start that follows a kill.
Printed are the restarts, the seconds from a kill to the end of the first minibatch after it (where no other kill came
between), and whether every loss is, bit by bit, that of the run without faults. Status 0 if all is as it should be.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from launching import Launch, curve, last_step, last_steps
from rich.console import Console
from rich.table import Table

PIPEPLAN = [sys.executable, "-m", "pipeplan"]
EPOCH = 40
"""Minibatches of an epoch."""
MINIBATCHES_A_KILL = 60
"""Of training, on average, between two kills."""


@dataclass
class Soak:
    """What came of a run with kills."""

    kills: int
    restarts: int
    status: int
    same: bool
    """Whether every loss was that of a run without faults."""
    minibatches: int
    back_s: list[float] = field(default_factory=list)
    """From a kill to the first minibatch after it."""

    @property
    def right(self) -> bool:
        """Whether the run ended as one without faults does."""
        return self.status == 0 and self.same and self.restarts == self.kills


def plan_mnist(folder: Path, workers: int, stages: int, model: str = "mnist") -> Path:
    """launch.sh of the best plan for the bundled model, or another, with so many stages."""
    profile, plan = folder / "profile.json", folder / "plan"
    cluster = ["--cluster", "local", "--workers", str(workers), "--stages", str(stages)]
    for arguments in (["profile", model, "-o", str(profile)], ["solve", str(profile), *cluster, "-o", str(plan)]):
        subprocess.run([*PIPEPLAN, *arguments], check=True, capture_output=True)
    return plan / "launch.sh"


def soak(script: Path, folder: Path, kills: int, seed: int) -> Soak:
    """Run without faults, then with so many kills."""
    epochs = 1 + kills * MINIBATCHES_A_KILL // EPOCH
    options = ("--epochs", str(epochs), "--max-minibatches", str(EPOCH), "--log-every", "0")
    options += ("--checkpoint-minibatches", "10", "--evaluate-every", "10")
    plain, faulty = folder / "plain", folder / "faulty"
    with Launch(script, plain, *options) as launch:
        if launch.wait() != 0:
            raise SystemExit(f"the run without faults failed: {launch.lines}")
    with Launch(script, faulty, *options, "--restarts", str(kills)) as launch:
        back_s = _kill(launch, random.Random(seed), kills, EPOCH * epochs)
        status = launch.wait()
    numbers = [int(line.partition("; restart ")[2].split()[0]) for line in launch.lines if "; restart " in line]
    same = curve(plain) == curve(faulty)
    return Soak(kills, max(numbers, default=0), status, same, EPOCH * epochs, back_s)


def _kill(launch: Launch, draw: random.Random, kills: int, minibatches: int) -> list[float]:
    """Kill workers; the seconds until the run was back, of the kills that no other followed before that."""
    back_s: list[float] = []
    killed_at = 0.0
    goals = sorted(draw.uniform(0.02, 0.9) * minibatches for _ in range(kills))
    for kill, goal in enumerate(goals):
        if kill % 4 == 3:
            time.sleep(draw.uniform(0, statistics.median(back_s) if back_s else 0))
        else:
            if kill:
                back_s.append(_back(launch) - killed_at)
            launch.until(lambda goal=goal: _done(launch.run) >= goal, "progress")  # type: ignore[misc]
            time.sleep(draw.uniform(0, 0.05))
        before = launch.workers()
        launch.kill(draw.choice(sorted(before)))
        killed_at = time.time()
        launch.until(lambda before=before: _all_new(launch, before), "restart")  # type: ignore[misc]
    return [*back_s, _back(launch) - killed_at]


def _back(launch: Launch) -> float:
    """When the workers of now have run a minibatch, in seconds since 1970."""
    now = time.time()
    launch.until(lambda: launch.latest_s() > now, "minibatch")
    return min(step["time_s"] for step in last_steps(launch.run) if step["time_s"] > now)


def _all_new(launch: Launch, before: dict[int, int]) -> bool:
    now = launch.workers()
    return len(now) == len(before) and not set(now.values()) & set(before.values())


def _done(run: Path) -> float:
    step = last_step(run)
    return 0.0 if step is None else step["epoch"] * EPOCH + step["minibatch"] + 1


def main() -> int:
    """Print the table; the status is 0 if all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = plan_mnist(Path(folder), given.workers, given.stages)
        result = soak(script, Path(folder), given.kills, given.seed)
    table = Table("kills", "restarts", "status", "back: median s", "most s", "of", "minibatches", "same losses")
    seconds = [f"{statistics.median(result.back_s):.1f}", f"{max(result.back_s):.1f}", str(len(result.back_s))]
    counts = [str(result.kills), str(result.restarts), str(result.status)]
    table.add_row(*counts, *seconds, str(result.minibatches), "yes" if result.same else "no")
    Console().print(table)
    return 0 if result.right else 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs a case of the self-test as launch.sh would, and compares its losses with the reference."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from pipeplan_launch.selftest.cases import CHECKPOINT_MINIBATCHES, Case, Result, write_plan
from pipeplan_launch.selftest.reference import KILL_RANK, Losses, reference_losses

ROUNDING = 1e-6
"""Largest difference of a minibatch's loss, which the metrics round."""
TOLERANCE = 1e-9
"""Largest difference of a mean loss, relative to it, that other orders of sums may make in 64-bit arithmetic."""
PATIENCE_S = 60.0
"""Seconds after which a launch counts as failed."""
MESSAGE_S = 20
"""Seconds that a worker of a launch waits for a message."""


def try_case(case: Case, device: str, folder: Path, patience_s: float = PATIENCE_S) -> Result:
    """Run a case in a new folder, and compare its losses with the reference."""
    began = time.perf_counter()
    write_plan(folder, case, device)
    problem = _launch(case, folder, ["--epochs", "1"], patience_s, kills=case.is_killed)
    if problem is None and case.is_killed:
        problem = _launch(case, folder, ["--epochs", str(case.epochs), "--resume"], patience_s)
    passed, text = False, problem or ""
    if problem is None:
        passed, text = compare(losses_of(folder / "run"), reference_losses(case, torch.device(device)))
    return Result(case.name, passed, text, time.perf_counter() - began)


def compare(found: Losses, expected: Losses) -> tuple[bool, str]:
    """(whether the losses are equal within the tolerance, a line that says so).

    The metrics round the loss of a minibatch, which therefore shows only where a difference began.
    """
    if len(found.minibatches) != len(expected.minibatches):
        return False, f"{len(found.minibatches)} losses were recorded where {len(expected.minibatches)} were expected"
    for index, (one, other) in enumerate(zip(found.minibatches, expected.minibatches, strict=True)):
        if not abs(one - other) <= ROUNDING * max(1.0, abs(other)):  # NaN is not <= anything
            return False, f"the loss of minibatch {index} is {one:.7g}, and {other:.7g} in one process"
    pairs = list(zip(found.means, expected.means, strict=True))
    largest = max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)
    count = f"{len(found.minibatches)} losses and the test loss"
    if largest == 0:
        return True, f"{count} equal those of one process, bit by bit"
    return largest <= TOLERANCE, f"{count} differ from those of one process by {largest:.0e} relative"


def losses_of(run: Path) -> Losses:
    """The losses that a run has recorded."""
    losses: dict[tuple[int, int], float] = {}
    for path in sorted((run / "metrics").glob("rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            if one["loss"] is not None:
                losses[one["epoch"], one["minibatch"]] = one["loss"]
    epochs = json.loads((run / "summary.json").read_text(encoding="utf-8"))["epochs"]
    means = [_number(one) for one in (*(epoch["loss"] for epoch in epochs), epochs[-1]["test_loss"])]
    return Losses([losses[key] for key in sorted(losses)], means)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _launch(case: Case, folder: Path, options: Sequence[str], patience_s: float, *, kills: bool = False) -> str | None:
    """The error of a launch in one line; None if there was none."""
    command = [sys.executable, "-m", "pipeplan_launch.supervisor", "--standalone", "--nnodes", "1"]
    command += ["--nproc-per-node", str(sum(case.replicas)), "-m", "pipeplan_launch", str(folder)]
    command += ["--run-dir", str(folder / "run"), "--transport", case.transport, "--log-every", "0"]
    command += ["--timeout", str(MESSAGE_S), "--restarts", str(int(kills)), "--probe", "0", *options]
    if case.is_killed:
        command += ["--checkpoint-minibatches", str(CHECKPOINT_MINIBATCHES)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop(KILL_RANK, None)
    if kills:
        environment[KILL_RANK] = "0"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return f"it did not end within {patience_s:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        return (lines or [f"it ended with status {done.returncode}"])[-1].removeprefix("error: ")
    if kills and not any("was lost; restart 1" in line for line in lines):
        return "no worker was noticed as lost, although one was killed"
    return None

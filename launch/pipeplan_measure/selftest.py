"""`python -m pipeplan_measure.selftest [--short] [--workers N] [--device KIND]`: small runs that show whether the
executor works on this machine.

Every run has its own plan, and is launched as by launch.sh. Its losses are compared with the losses of one process
that applies the formula for weight versions literally (`selftest_reference`). Progress goes to stderr. The result is
one line of JSON: `device`, `workers`, `hardware`, `results` (each with `name`, `passed`, `text` and `seconds`),
`transport` (the mode that `--transport auto` will use here) and `remembered`, the file that records the mode; null on
machines without GPUs. The exit status is 0 if everything passed, else 2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pipeplan_launch.devices.backend import cuda_devices, cuda_text, nccl_version
from pipeplan_launch.devices.selftest_cache import remember
from pipeplan_launch.plan.run_options import GLOO, NCCL
from pipeplan_measure.selftest_reference import (
    ACCUMULATING,
    CHECKPOINT_MINIBATCHES,
    JOB,
    KILL_RANK,
    LAYERS,
    MINIBATCH,
    Case,
    Losses,
    reference_losses,
)
from pipeplan_measure.small_plans import write_stage_files


def cases(workers: int) -> list[Case]:
    """Runs of at most `workers` workers, the most important first: several schedules, transports and shapes of plan."""
    if workers < 2:
        return [Case((1,), "1f1b-stashing")]
    ordered = [Case((1, 1), "1f1b-stashing", NCCL), Case((1, 1), "vertical-sync", NCCL)]
    found = [Case((1, 1), "1f1b-stashing"), *ordered, Case((1,), "1f1b-stashing"), Case((2,), "1f1b-stashing")]
    found += [Case((1, 1), name) for name in ("2bw", "gpipe")]
    found.append(Case((1, 1), "1f1b-flush", is_killed=True))
    for replicas in ((2, 1), (1, 2), (2, 2), (3, 2)):
        if sum(replicas) <= workers:
            found += [Case(replicas, "1f1b-stashing", mode) for mode in (NCCL, GLOO)]
    return found


def write_plan(folder: Path, case: Case, device: str) -> Path:
    """Write the stage files of a case into a plan folder; returns the folder."""
    pipeline, first = [], 0
    for count, depth in zip(case.replicas, case.depths, strict=True):
        pipeline.append({"workers": list(range(first, first + count)), "depth": depth, "versions": depth + 1})
        first += count
    schedule: dict[str, Any] = {"name": case.schedule}
    if case.schedule in ACCUMULATING:
        schedule["accumulate"] = case.accumulate
    layers = LAYERS[len(case.replicas)]
    shared = {"minibatch": MINIBATCH, "device": device, "schedule": schedule, "prediction": {"minibatch_s": 0.01}}
    write_stage_files(folder, JOB, pipeline, [shared | {"layers": names} for names in layers])
    return folder


@dataclass
class Result:
    """The result of a case or of a measurement."""

    name: str
    passed: bool
    text: str
    """The finding in one line."""
    seconds: float = 0.0


def verdict(results: Sequence[tuple[Case, Result]], device: str) -> str:
    """The mode for `--transport auto`: `nccl` if every run with `nccl` passed, else `gloo`."""
    tried = [result for case, result in results if case.transport == NCCL]
    return NCCL if device != "cpu" and tried and all(result.passed for result in tried) else GLOO


ROUNDING = 1e-6
"""Largest accepted difference of a minibatch's loss, because the metrics round it."""
TOLERANCE = 1e-9
"""Largest accepted relative difference of a mean loss: the effect of another order of summation in 64-bit
arithmetic."""
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
    """(whether the losses are equal within the tolerance, a line with the finding).

    The metrics round the loss of a minibatch. So this loss only shows where a difference began.
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
    means = [*(epoch["loss"] for epoch in epochs), epochs[-1]["test_loss"]]
    return Losses([losses[key] for key in sorted(losses)], [math.nan if one is None else one for one in means])


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


WHOLE_S = 115.0
"""Seconds after which no further run begins."""
SHORT_PATIENCE_S = 25.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self-test; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipeplan_measure.selftest")
    parser.add_argument("--short", action="store_true", help="only what decides how messages travel")
    parser.add_argument("--workers", type=int, help="most workers of a run (the GPUs, or the cores, at least two)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device of the workers (cuda if there is a GPU)")
    options = parser.parse_args(arguments)
    gpus = cuda_devices()
    device = options.device or ("cuda" if gpus else "cpu")
    workers = options.workers or (gpus if device == "cuda" else max(2, min(5, os.cpu_count() or 2)))
    decisive = [Case((1, 1), "1f1b-stashing", NCCL)] if workers > 1 else []  # for the mode of a machine with GPUs
    chosen = decisive if options.short else cases(workers)
    tried = _run_cases(chosen, device, SHORT_PATIENCE_S if options.short else PATIENCE_S)
    results = [result for _, result in tried]
    transport = verdict(tried, device)
    remembered = str(remember(transport)) if device == "cuda" else None
    report = {
        "device": device,
        "workers": workers,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {cuda_text()}, torch {torch.__version__}, "
        f"NCCL {nccl_version() or 'none'}",
        "results": [asdict(result) for result in results],
        "transport": transport,
        "remembered": remembered,
    }
    print(json.dumps(report), flush=True)
    return 0 if all(result.passed for result in results) else 2


def _run_cases(chosen: Sequence[Case], device: str, patience_s: float) -> list[tuple[Case, Result]]:
    """Run the cases in turn, as long as there is time."""
    began = time.perf_counter()
    tried: list[tuple[Case, Result]] = []
    with tempfile.TemporaryDirectory(prefix="pipeplan-selftest-") as folder:
        for number, case in enumerate(chosen):
            if time.perf_counter() - began > WHOLE_S:
                print(f"not run, for lack of time: {case.name}", file=sys.stderr, flush=True)
                continue
            result = try_case(case, device, Path(folder) / str(number), patience_s)
            state = "passed" if result.passed else "FAILED"
            print(f"{state} in {result.seconds:.0f} s: {case.name}: {result.text}", file=sys.stderr, flush=True)
            tried.append((case, result))
    return tried


if __name__ == "__main__":
    sys.exit(main())

"""`python -m pipeplan_launch.selftest [--short] [--workers N] [--device KIND]`: the self-test as one line of JSON.

Progress goes to stderr. The line has `device`, `workers`, `hardware`, `results` (for each `name`, `passed`, `text`,
`seconds` and `figures`), `transport` (the mode that `--transport auto` is to use here) and `remembered`, the file where
that was written down, null on machines without GPUs. The exit status is 0 if everything passed, else 2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from pipeplan_launch.devices.backend import cuda_devices, cuda_text, nccl_version
from pipeplan_launch.devices.selftest_cache import remember
from pipeplan_launch.selftest.cases import Case, Result, cases, short_cases, verdict
from pipeplan_launch.selftest.launches import PATIENCE_S, try_case
from pipeplan_launch.selftest.transport_benchmark import measure_paths

WHOLE_S = 115.0
"""Seconds after which no further run is begun."""
SHORT_PATIENCE_S = 25.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self-test; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipeplan_launch.selftest")
    parser.add_argument("--short", action="store_true", help="only what decides how messages travel")
    parser.add_argument("--workers", type=int, help="most workers of a run (the GPUs, or the cores, at least two)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device of the workers (cuda if there is a GPU)")
    options = parser.parse_args(arguments)
    gpus = cuda_devices()
    device = options.device or ("cuda" if gpus else "cpu")
    workers = options.workers or (gpus if device == "cuda" else max(2, min(5, os.cpu_count() or 2)))
    chosen = short_cases(workers) if options.short else cases(workers)
    tried = _run_cases(chosen, device, SHORT_PATIENCE_S if options.short else PATIENCE_S)
    results = [result for _, result in tried]
    if not options.short and workers > 1:
        results += measure_paths(device)
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
    """Run the cases one after another, as long as there is time."""
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

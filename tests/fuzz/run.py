"""Random damaged inputs without pytest: N cases over all kinds, in this process, and what they took.

    PYTHONPATH=tests/support python tests/fuzz/run.py [--cases 20000] [--first 1000000] [--kind KIND …]

The cases of a kind have the seeds from `--first` on. Each has 30 s of CPU time and 1 GiB, as in the tests. Findings are
printed as they come; the table at the end has the slowest case and the largest growth of this process's memory. The
status is 0 without findings. One core; `--first` parts the work among several processes.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import bases
from kinds import ALL_KINDS, run_case
from rich.console import Console
from rich.table import Table


def main() -> int:
    """Print the findings and the table; the status is 0 if there are none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=1_000_000)
    parser.add_argument("--kind", action="append", choices=ALL_KINDS)
    given = parser.parse_args()
    kinds = given.kind or list(ALL_KINDS)
    found: Counter[str] = Counter()
    slowest: dict[str, tuple[float, int]] = {}
    seconds: Counter[str] = Counter()
    os.environ["COLUMNS"] = "80"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        planned = [Path(folder, made) for made in bases.plan_folders()]
        before = _peak_bytes()
        for number in range(given.cases):
            kind, seed = kinds[number % len(kinds)], given.first + number // len(kinds)
            began = time.monotonic()
            if wrong := run_case(kind, seed, planned, Path(folder, "case")):
                found[kind] += 1
                print(wrong, end="\n\n", flush=True)
            took = time.monotonic() - began
            seconds[kind] += took
            slowest[kind] = max(slowest.get(kind, (0.0, 0)), (took, seed))
            if (number + 1) % 1000 == 0:
                print(f"{number + 1} cases, {found.total()} findings, {seconds.total():.0f} s", flush=True)
        os.chdir("/")
    table = Table("kind", "cases", "findings", "seconds", "slowest", "its seed")
    for place, kind in enumerate(kinds):
        cases = len(range(place, given.cases, len(kinds)))
        worst, seed = slowest.get(kind, (0.0, 0))
        table.add_row(kind, str(cases), str(found[kind]), f"{seconds[kind]:.0f}", f"{worst:.1f} s", str(seed))
    Console().print(table)
    print(f"memory grew by {(_peak_bytes() - before) / 2**20:.0f} MiB at its peak")
    return 1 if found else 0


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())

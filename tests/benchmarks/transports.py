"""Whether the one order of transfers slows anything down on CPUs: README's main job by every transport, in turns.

    python tests/benchmarks/transports.py [--runs N] [--epochs N]

The README's job (three stages on three local workers, no stale gradients) is profiled and planned once. Then each round
runs it once by every way for messages: `auto`, which is shared memory on one machine; `host` over Gloo; `nccl` and
`batched`, which are the one order over Gloo, since there is no NCCL on CPUs. The table has the median and the range of
the measured minibatches per second, and its share of that of `auto`. A second table has the same for a plan whose
stages compute nothing, where only messages are left (executor_pace.py, overhead).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from sleeping import How, Load
from sleeping import run as run_sleeping

WAYS = {
    "auto (shared memory)": ("auto", True),
    "host over Gloo": ("host", False),
    "nccl (one order, Gloo)": ("nccl", True),
    "batched (one order, Gloo)": ("batched", True),
}
"""For each way the value of --transport, and whether messages may go through shared memory."""
FLOATS = 25_000


def _run(folder: Path, *arguments: object, shared_memory: bool = True) -> None:
    environment = os.environ | {"PIPEPLAN_SHARED_MEMORY": str(int(shared_memory))}
    command = [str(one) for one in arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stdout}{done.stderr}")


def readme_paces(folder: Path, runs: int, epochs: int) -> dict[str, list[float]]:
    """Minibatches per second of the README's job by every way, one for each round."""
    pipeplan = (sys.executable, "-m", "pipeplan")
    _run(folder, *pipeplan, "profile", "mnist")
    _run(folder, *pipeplan, "solve", *["--cluster", "local", "--workers", "3", "--stages", "3"])
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(runs):
        for name, (transport, shared_memory) in WAYS.items():
            run = folder / f"{transport}-{int(shared_memory)}-{number}"
            options = ("--epochs", epochs, "--log-every", 0, "--transport", transport, "--run-dir", run)
            _run(folder, folder / "plan" / "launch.sh", *options, shared_memory=shared_memory)
            found[name].append(1 / json.loads((run / "summary.json").read_text())["minibatch_s"]["measured"])
    return found


def empty_paces(runs: int, minibatches: int = 400) -> dict[str, list[float]]:
    """Minibatches per second of a plan 1-1-1 whose stages compute nothing, 0.1 MB across each cut."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(runs):
        for name, (transport, shared_memory) in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                how = How(shared_memory=shared_memory, transport=transport)
                summary = run_sleeping(Path(folder) / "plan", [1, 1, 1], Load(0.0, 0.0, FLOATS), minibatches, how)
            found[name].append(1 / summary["minibatch_s"]["measured"])
    return found


def table(found: Mapping[str, Sequence[float]]) -> str:
    """One line for each way."""
    base = statistics.median(found["auto (shared memory)"])
    lines = []
    for name, paces in found.items():
        median = statistics.median(paces)
        lines.append(
            f"{name:<26} {median:7.1f} minibatches/s  {min(paces):.1f}-{max(paces):.1f}  {median / base:.2f} x auto"
        )
    return "\n".join(lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print("README's job, three stages", flush=True)
        print(table(readme_paces(Path(folder), given.runs, given.epochs)), flush=True)
    print("three stages that compute nothing, 0.1 MB across each cut")
    print(table(empty_paces(given.runs)))


if __name__ == "__main__":
    main()

"""CPU seconds that the command line takes, interpreter start included, and whether it imports torch.

    python tests/benchmarks/startup.py [--runs N]

Each command runs several times in a fresh process; the median counts.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

PIPEPLAN = [sys.executable, "-m", "pipeplan"]
BUNDLED = Path(__file__).resolve().parents[2] / "profiles" / "vgg16-v100.json"
SOLVE = ["solve", str(BUNDLED), "--cluster", "B", "--no-write"]
COMMANDS = [
    ("pipeplan --help", ["--help"], 0.3),
    ("pipeplan solve --help", ["solve", "--help"], 0.3),
    ("pipeplan solve --cluster B --solver dp", [*SOLVE, "--solver", "dp"], 1.0),
    ("pipeplan solve --cluster B", SOLVE, 5.0),
]


def seconds(arguments: list[str]) -> float:
    """CPU seconds of one run of the CLI."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run([*PIPEPLAN, *arguments], check=True, capture_output=True)
    return used() - before


def imports_torch(arguments: list[str]) -> bool:
    """Whether the command imports torch."""
    code = f"import sys\nfrom pipeplan.cli import main\nsys.argv[1:] = {arguments!r}\ntry:\n    main()\nfinally:\n"
    code += "    print('torch' in sys.modules, file=sys.stderr)\n"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stderr.strip().endswith("True")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    table = Table("command", "median s", "least s", "aim s", "imports torch")
    for name, arguments, aim in COMMANDS:
        times = [seconds(arguments) for _ in range(runs)]
        torch = "yes" if imports_torch(arguments) else "no"
        table.add_row(name, f"{statistics.median(times):.2f}", f"{min(times):.2f}", f"{aim:g}", torch)
    Console().print(table)


if __name__ == "__main__":
    main()

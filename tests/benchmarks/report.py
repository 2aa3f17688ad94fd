"""How large reports are, and how long they take to write and to open in a browser.

    PYTHONPATH=tests/support .venv/bin/python tests/benchmarks/report.py [--runs N] [--no-browser]

VGG-16 on two servers of eight, GNMT-16 on cluster A (which branches, and whose network cards bind), and two plans of
1,000 layers on 1,024 workers: seven stages, the last of them very wide, and a pipeline of hundreds of stages. Each is
planned once, and `pipeplan report` then runs in fresh processes, interpreter start included; the median counts. The
column `solve` is how long `pipeplan solve` takes for the same plan, for comparison (the dynamic program alone for the
large ones). With chromium (and playwright), the page is opened in new windows.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from large_instances import chain, cluster
from rich.console import Console
from rich.table import Table

from pipeplan.cluster_data.cluster_toml import load_cluster
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_folder
from pipeplan.util import files

PIPEPLAN = [sys.executable, "-m", "pipeplan"]
WIDTH = 110
SIZE_AIM, LARGE_SIZE_AIM, OPEN_AIM = 1e6, 5e6, 1.0


def instances() -> Iterator[tuple[str, Problem, Settings]]:
    """What is planned, by name."""
    both, quick = Settings(), Settings(solver="dp", certify=False, gap=0.01)
    for name, where in (("vgg16", "B"), ("gnmt16", "A")):
        profile = Profile.load(files.bundled_folder("profiles") / f"{name}-v100.json")
        yield f"{name} on {where}", Problem(profile, load_cluster(where)), both
    large = chain(1000)
    wide, straight = Options(recompute=False), Options(max_replicas=1, memory=False)
    yield "1,000 layers × 1,024 workers", Problem(large, cluster(8, 128, memory_gib=110), wide), quick
    yield "the same, straight", Problem(large, cluster(8, 128), straight), quick


def planned(problem: Problem, settings: Settings, folder: Path) -> tuple[str, float]:
    """Solve and write the plan and its profile: its configuration in short, and the seconds that took."""
    began = time.perf_counter()
    outcome = solve(problem, settings)
    plan_folder.write_plan(outcome, folder)
    took = time.perf_counter() - began
    problem.profile.save(folder / "profile.json")
    config = outcome.plan.config
    return (config if len(config) <= 20 else f"{len(outcome.plan.stages)} stages"), took


def written(folder: Path, runs: int) -> tuple[list[float], int]:
    """Seconds that the command takes, each time, and bytes of what it writes."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run([*PIPEPLAN, "report", str(folder)], check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    return times, (folder / "report.html").stat().st_size


def opened(folder: Path, runs: int) -> str:
    """Seconds until the page is drawn, as text."""
    from opening import measured

    return f"{statistics.median(measured(folder / 'report.html', runs)):.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-browser", action="store_true")
    given = parser.parse_args()
    table = Table("plan of", "plan", "KB", "aim KB", "solve s", "report s", "opens s", "aim s")
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, problem, settings) in enumerate(instances()):
            folder = Path(scratch) / str(number)
            config, solving_s = planned(problem, settings, folder)
            times, size = written(folder, given.runs)
            opens = "" if given.no_browser else opened(folder, given.runs)
            large = problem.cluster.workers > 100
            aims = f"{(LARGE_SIZE_AIM if large else SIZE_AIM) / 1e3:.0f}", "" if large else f"{OPEN_AIM:g}"
            row = [name, config, f"{size / 1e3:.0f}", aims[0], f"{solving_s:.1f}", f"{statistics.median(times):.2f}"]
            table.add_row(*row, opens, aims[1])
    Console(width=WIDTH).print(table)


if __name__ == "__main__":
    main()

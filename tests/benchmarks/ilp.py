"""How long the integer program takes: size, time, bound and gap on the rows of PipeDream's Table 1.

    python tests/benchmarks/ilp.py [FOLDER] [--time-limit SECONDS]

FOLDER (or the environment variable PIPEPLAN_REFERENCE) holds the published profiles, `pipedream/vgg16.txt` and so on
(github.com/msr-fiddle/pipedream). Without it only the bundled profile of VGG-16 is solved, and the table says so. Every
instance is solved twice: cold, on its own, and below the pace of the dynamic program's plan, as `pipeplan solve` does.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import evaluate
from pipeplan.importers import pipedream
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.result import Result
from pipeplan.util import files

# Profile: minibatch measured, minibatch of Table 1 (Narayanan et al., SOSP 2019), servers by cluster.
ROWS = {
    "vgg16": (128, 64, {"A": 4, "B": 2}),
    "alexnet": (256, 256, {"A": 4, "B": 2}),
    "resnet50": (128, 128, {"A": 4, "B": 2}),
    "gnmt8": (64, 64, {"A": 3, "A, one server": 1, "B": 2}),
    "gnmt16": (64, 64, {"A": 4, "A, one server": 1, "B": 2}),
}
BUNDLED = {"A": 4, "A, one server": 1, "B": 2}
# What memory binds on: the bundled VGG-16 on cluster B with devices of so many GiB.
SMALL_GIB = 6
MAXIMUM_CUTS = 20_000


def instances(folder: Path | None) -> Iterator[tuple[str, Problem]]:
    """By name: the bundled profile, then the published ones."""
    bundled = Profile.load(files.bundled_folder("profiles") / "vgg16-v100.json")
    for where, servers in BUNDLED.items():
        yield f"vgg16, bundled, {where}", Problem(bundled, on(where, servers))
    small = on("B", 2)
    small = replace(small, device=replace(small.device, memory_bytes=SMALL_GIB << 30))
    yield f"vgg16, bundled, B with {SMALL_GIB} GiB", Problem(bundled, small)
    if folder is None:
        return
    for name, (measured, minibatch, clusters) in ROWS.items():
        profile = pipedream.read_pipedream_profile(folder / f"{name}.txt", measured).rescaled(minibatch)
        for where, servers in clusters.items():
            yield f"{name}, {where}", Problem(profile, on(where, servers))


def on(where: str, servers: int) -> Cluster:
    """A bundled cluster with so many servers."""
    return cluster_toml.load_cluster(where[0]).with_servers(servers)


def row(table: Table, name: str, how: str, result: Result) -> None:
    """Add one solved instance."""
    plan = result.plan.config if result.plan else "none"
    figures = (f"{result.seconds:.2f}", f"{result.objective_s:.8g}", f"{result.bound_s:.8g}", f"{result.gap:.1e}")
    columns, rows = result.size or (0, 0)
    table.add_row(name, how, str(columns), str(rows), *figures, str(result.status), plan)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.environ.get("PIPEPLAN_REFERENCE"))
    parser.add_argument("--time-limit", type=float, default=60.0)
    arguments = parser.parse_args()
    folder = Path(arguments.folder) / "pipedream" if arguments.folder else None
    if folder and not folder.is_dir():
        parser.error(f"there is no folder {folder}")
    limits = integer_program.IlpLimits(seconds=arguments.time_limit)
    headings = ("instance", "", "variables", "rows", "s", "s/minibatch", "bound", "gap", "status", "plan")
    table, seconds, proven = Table(*headings), [], 0
    for name, problem in instances(folder):
        first = dynamic_program.solve(problem, enumerate_cuts(problem, MAXIMUM_CUTS))
        cutoff_s = evaluate(first.plan, problem).pace_s if first.plan else None
        for how, cutoff in (("cold", None), ("below the DP's", cutoff_s)):
            result = integer_program.solve(problem, limits, cutoff)
            row(table, name, how, result)
            seconds.append(result.seconds)
            proven += result.status == "optimal"
    console = Console(width=160)
    console.print(table)
    console.print(
        f"{proven} of {len(seconds)} proven; median {statistics.median(seconds):.2f} s, most {max(seconds):.2f}"
    )
    if folder is None:
        console.print("the published profiles were left out: no FOLDER, and no PIPEPLAN_REFERENCE in the environment")


if __name__ == "__main__":
    main()

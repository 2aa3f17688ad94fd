"""How long the integer program takes: size, time, bound and gap on the rows of PipeDream's Table 1.

    python tests/benchmarks/ilp.py [FOLDER] [--time-limit SECONDS]
    python tests/benchmarks/ilp.py --chains [--workers 64] [--only SEED,…] [--cpu]

FOLDER (or the environment variable PIPEPLAN_REFERENCE) holds the published profiles, `pipedream/vgg16.txt` and so on
(github.com/msr-fiddle/pipedream). Without it only the bundled profile of VGG-16 is solved, and the table says so. Every
instance is solved twice: cold, on its own, and below the pace of the dynamic program's plan, as `pipeplan solve` does.

With `--chains` the instances are those of `transformer_chains.py` with up to so many workers, below the pace of the
plan that the dynamic program finds in 20 s, if it finds one. A row says how far the bound is below that pace, and
whether the program confirms the plan. With `--cpu` limits are CPU seconds, for a machine that has other work; HiGHS
alone still goes by the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformer_chains import instance

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
CHAINS = range(70)
DP_S = 20.0
"""Seconds of the dynamic program for a chain."""


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


def confirm_chains(seeds: Iterable[int], limits: integer_program.IlpLimits) -> None:
    """Print a row for each chain, and a summary."""
    gaps: list[float] = []
    proven = 0
    for seed in seeds:
        problem = instance(seed)
        first = dynamic_program.solve(problem, enumerate_cuts(problem, MAXIMUM_CUTS), DP_S)
        pace_s = evaluate(first.plan, problem).pace_s if first.plan else None
        began = time.process_time()
        result = integer_program.solve(problem, limits, pace_s)
        spent_s = time.process_time() - began
        best_s = min(pace_s or float("inf"), result.objective_s)
        gaps.append(max(0.0, 1.0 - result.bound_s / best_s))
        proven += result.status == ("infeasible" if pace_s is None else "optimal")
        asked = f"{len(problem.units):>4} layers {problem.cluster.workers:>3} GPUs {problem.options.schedule:<13}"
        config = first.plan.config if first.plan else "the DP has no plan"
        print(
            f"{seed:>3} {asked} {config[:32]:<32} gap {gaps[-1]:7.3%} {spent_s:6.1f} CPU s {result.status}", flush=True
        )
    print(f"{len(gaps)} chains: {proven} proven, {sum(gap <= 0.01 for gap in gaps)} with a gap of at most 1%")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.environ.get("PIPEPLAN_REFERENCE"))
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--chains", action="store_true", help="the random transformers in place of the table's rows")
    parser.add_argument("--workers", type=int, default=64, help="the most workers of a chain")
    parser.add_argument("--only", default="", help="seeds of chains")
    parser.add_argument("--cpu", action="store_true", help="limit CPU seconds in place of wall-clock seconds")
    arguments = parser.parse_args()
    limits = integer_program.IlpLimits(seconds=arguments.time_limit)
    if arguments.cpu:
        time.perf_counter = time.process_time  # the clock of all deadlines
    if arguments.chains:
        seeds = [int(seed) for seed in arguments.only.split(",") if seed] or CHAINS
        confirm_chains((seed for seed in seeds if instance(seed).cluster.workers <= arguments.workers), limits)
        return
    folder = Path(arguments.folder) / "pipedream" if arguments.folder else None
    if folder and not folder.is_dir():
        parser.error(f"there is no folder {folder}")
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

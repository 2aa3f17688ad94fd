"""How long planning takes, beside published planners, and how it grows with cuts and workers.

    python tests/benchmarks/planning.py [FOLDER] [--quick]

FOLDER holds the published PipeDream profiles (graph.txt files; default: $PIPEPLAN_REFERENCE/pipedream); what needs them
is skipped without. Peers' figures: PipeDream's optimiser and Piper measured by us and by their papers on 2 cores; dnn-
partitioning as its authors report.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from large_instances import chain, cluster, inception, nasnet

from pipeplan.cluster_data import cluster_toml
from pipeplan.importers import pipedream
from pipeplan.planning.settings import MAXIMUM_CUTS
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import dynamic_program


@dataclass(frozen=True)
class Case:
    """One instance, with what it should take and what a peer took."""

    name: str
    problem: Problem
    target_s: float
    peer: str = ""
    gap: float = 0.0
    """How close to the best is close enough, relative."""


def cases(folder: Path | None) -> Iterator[Case]:
    """The instances of the table, easiest first."""
    if folder is None:
        print("no published profiles: their rows are skipped", file=sys.stderr)
    else:
        yield Case(
            "ResNet-50, 2x8",
            Problem(_published(folder, "resnet50", 128), cluster_toml.load_cluster("B")),
            0.3,
            "PipeDream 77.5 s",
        )
        gnmt = _published(folder, "gnmt16", 64)
        yield Case("GNMT-16, 2x8", Problem(gnmt, cluster_toml.load_cluster("B")), 2, "PipeDream > 200 s")
        yield Case("GNMT-16, 4x4", Problem(gnmt, cluster_toml.load_cluster("A")), 2, "PipeDream > 1,500 s")
    six = cluster(6, level=3)
    yield Case("Inception-v3-like, 6", Problem(inception(), six), 10, "dnn-partitioning > 1,200 s exact")
    yield Case("NASNet-like, 6", Problem(nasnet(), six), 60)
    tight = Problem(chain(1000), cluster(8, 512, memory_gib=110), Options(recompute=False))
    yield Case("1,000 layers, 512x8", tight, 5, "Piper 65 s (37 layers x 2,048)")
    yield Case("the same to 1%", tight, 5, gap=0.01)
    yield Case("3,000 layers, 64x32x8", Problem(chain(3000), cluster(8, 32, 64, memory_gib=1000)), 30)


def _published(folder: Path, name: str, minibatch: int) -> Profile:
    return pipedream.read_pipedream_profile(folder / f"{name}.txt", minibatch)


def measure(case: Case) -> None:
    """Print one row: seconds for cuts and search together, memory of the process so far."""
    began = time.perf_counter()
    cuts = enumerate_cuts(case.problem, MAXIMUM_CUTS)
    result = dynamic_program.solve(case.problem, cuts, 600, case.gap)
    seconds = time.perf_counter() - began
    stages = f"{len(result.plan.stages)} stages" if result.plan else "-"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(
        f"{case.name:<24} {len(cuts.ideals):>7} {case.problem.cluster.workers:>7} {seconds:>8.2f} s "
        f"(≤ {case.target_s:g}) {peak:>6.2f} GiB  {result.status:<11} gap {result.gap:<8.2g} {stages:<11} {case.peer}",
        flush=True,
    )


def growth() -> None:
    """Fit seconds ≈ a · cuts^x · workers^y over a range of chains, with the limit on memory in force."""
    rows = []
    for layers in (125, 250, 500):
        for servers in (8, 32, 128):
            # So little memory that the model has to be split, however many layers it has.
            servers_of_8 = cluster(8, servers, memory_gib=0.08 * layers)
            problem = Problem(chain(layers), servers_of_8, Options(recompute=False))
            cuts = enumerate_cuts(problem, MAXIMUM_CUTS)
            took = _seconds(problem, cuts)
            rows.append((layers, 8 * servers, took))
            print(f"  {layers:>5} cuts, {8 * servers:>5} workers: {took:.2f} s", flush=True)
    table = np.log(np.array(rows))
    design = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]])
    (_, by_cuts, by_workers), *_ = np.linalg.lstsq(design, table[:, 2], rcond=None)
    print(f"grows with cuts^{by_cuts:.2f} and workers^{by_workers:.2f}")
    print(
        "predicted: cuts^2 for pairs of cuts (less where fixed costs for each cut prevail), and in the workers only as"
    )
    print("far as the states kept at a cut do, which the number of distinct first workers bounds")


def _seconds(problem: Problem, cuts: object) -> float:
    began = time.perf_counter()
    dynamic_program.solve(problem, cuts, 600)  # type: ignore[arg-type]
    return time.perf_counter() - began


def main() -> None:
    """Run every case in a process of its own, so that its memory is its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--quick", action="store_true", help="leave out the fit of growth")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    reference = os.environ.get("PIPEPLAN_REFERENCE")
    folder = given.folder or (Path(reference) / "pipedream" if reference else None)
    known = list(cases(folder)) if given.only is None else []
    if given.only is not None:
        measure(list(cases(folder))[given.only])
        return
    print(f"{'instance':<24} {'cuts':>7} {'workers':>7} {'time':>10} (target)   memory  status")
    for index in range(len(known)):
        arguments = [sys.executable, __file__, *([str(folder)] if folder else []), "--only", str(index)]
        subprocess.run(arguments, check=True, stderr=subprocess.DEVNULL)
    if not given.quick:
        growth()


if __name__ == "__main__":
    main()

"""How long the dynamic program takes on large instances, how close it comes, and when it first has a plan and a bound.

    python tests/benchmarks/scale.py [--only NAME] [--seconds 60] [--with KIND] [--growth]

Every instance is solved in a process of its own. A row has the CPU seconds of the whole process, the wall-clock seconds
of the solver, the largest resident memory, the gap (with every shared resource to itself), and after how many seconds
there was a first plan, a first bound, and a gap of at most 1%. --with adds a cost to every instance, so that its rows
show what that cost takes: `sharding` divides the optimiser's state among replicas, `executor` charges the time and the
memory of the executor itself, and `tied` lets two layers share weights. With --growth the time of chains whose memory
binds is fitted by powers of the numbers of layers and workers, and the fit is compared with larger chains.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from large_instances import KINDS, chain, cluster, with_cost

from pipeplan.planning.settings import MAXIMUM_CUTS
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program

PLAIN, KEEPING = Options(contention=False), Options(contention=False, recompute=False)
FLUSH = Options(contention=False, schedule="1f1b-flush", accumulate=64)
INSTANCES: dict[str, tuple[Callable[[], Problem], float]] = {
    "1,000 x 4,096": (lambda: Problem(chain(1000), cluster(8, 512, memory_gib=110), KEEPING), 0.0),
    "1,000 x 4,096 to 1%": (lambda: Problem(chain(1000), cluster(8, 512, memory_gib=110), KEEPING), 0.01),
    "3,000 x 16,384": (lambda: Problem(chain(3000), cluster(8, 32, 64, memory_gib=1000), PLAIN), 0.0),
    "2,000 x 131,072 to 1%": (lambda: Problem(chain(2000), cluster(8, 128, 128, memory_gib=110), KEEPING), 0.01),
    "203 x 512, flush": (lambda: Problem(chain(203), cluster(8, 64), FLUSH), 0.01),
    "403 x 16, tight": (lambda: Problem(chain(403), cluster(8, 2, memory_gib=12), PLAIN), 0.0),
    "403 x 16, 2bw": (lambda: Problem(chain(403), cluster(8, 2, memory_gib=12), _asynchronous("2bw", 32)), 0.01),
    "403 x 16, vertical": (
        lambda: Problem(chain(403), cluster(8, 2, memory_gib=20), _asynchronous("vertical-sync")),
        0.01,
    ),
}
"""By name: the layers times the workers, and the gap that is enough. The memory binds, except on 16,384 workers."""
FITTED = tuple((layers, servers) for layers in (125, 250, 500) for servers in (8, 32, 128))
PREDICTED = ((1000, 128), (1000, 512))
"""Layers and servers of 8 workers."""


def _asynchronous(schedule: str, accumulate: int | None = None) -> Options:
    return Options(contention=False, schedule=schedule, accumulate=accumulate)


def measure(name: str, seconds: float, kind: str) -> None:
    """Solve an instance, with a kind of cost added, and print its row."""
    make, gap = INSTANCES[name]
    problem = with_cost(make(), kind)
    began, told = time.perf_counter(), list[tuple[float, float, float]]()
    cuts = enumerate_cuts(problem, MAXIMUM_CUTS)

    def report(bound_s: float, best_s: float) -> None:
        told.append((time.perf_counter() - began, bound_s, best_s))

    result = dynamic_program.solve(problem, cuts, seconds, gap, report)
    took = time.perf_counter() - began
    told.append((took, result.bound_s, result.objective_s))
    moments = (
        _first(told, lambda bound, best: best < float("inf")),
        _first(told, lambda bound, best: bound > 0),
        _first(told, lambda bound, best: bound >= 0.99 * best),
    )
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    stages = f"{len(result.plan.stages)} stages" if result.plan else "no plan"
    print(
        f"{name:<23} {time.process_time():>7.1f} {took:>7.1f} {gib:>6.2f}  {result.gap:>8.3%}  "
        + " ".join(f"{moment:>8}" for moment in moments)
        + f"  {result.status}, {stages}",
        flush=True,
    )


def _first(told: list[tuple[float, float, float]], known: Callable[[float, float], bool]) -> str:
    """When the best so far first was as asked, in seconds."""
    bound, best = 0.0, float("inf")
    for at, low, high in told:
        bound, best = max(bound, low), min(best, high)
        if known(bound, best):
            return f"{at:.1f}"
    return "-"


def growth() -> None:
    """Fit seconds ≈ a · layers^x · workers^y, and print measured beside predicted seconds of larger chains."""
    rows = []
    for layers, servers in FITTED:
        rows.append((layers, 8 * servers, _seconds(layers, servers)))
        print("  {:>5} layers, {:>5} workers: {:.2f} CPU s".format(*rows[-1]), flush=True)
    table = np.log(np.array(rows))
    design = np.column_stack([np.ones(len(table)), table[:, :2]])
    fit, *_ = np.linalg.lstsq(design, table[:, 2], rcond=None)
    print(f"CPU seconds grow with layers^{fit[1]:.2f} and workers^{fit[2]:.2f}")
    for layers, servers in PREDICTED:
        predicted = float(np.exp(fit @ [1, np.log(layers), np.log(8 * servers)]))
        print(f"  predicted {predicted:.1f} s, measured {_seconds(layers, servers):.1f} s")


def _seconds(layers: int, servers: int) -> float:
    # So little memory that the model has to be split, however many layers it has.
    problem = Problem(chain(layers), cluster(8, servers, memory_gib=0.08 * layers), KEEPING)
    began = time.process_time()
    dynamic_program.solve(problem, enumerate_cuts(problem, MAXIMUM_CUTS), 600)
    return time.process_time() - began


def main() -> None:
    """Print a row for every instance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(INSTANCES))
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of each solve")
    parser.add_argument("--with", dest="kind", choices=KINDS, default="nothing", help="what every instance also has")
    parser.add_argument("--growth", action="store_true", help="fit how the time grows, instead of the table")
    given = parser.parse_args()
    if given.growth:
        growth()
        return
    if given.only:
        measure(given.only, given.seconds, given.kind)
        return
    headings = f"{'CPU s':>7} {'wall s':>7} {'GiB':>6}  {'gap':>8}  {'plan':>8} {'bound':>8} {'1%':>8}"
    print(f"{'layers x workers':<23} {headings}", flush=True)
    for name in INSTANCES:
        options = ["--seconds", str(given.seconds), "--with", given.kind]
        subprocess.run([sys.executable, __file__, "--only", name, *options], check=True)


if __name__ == "__main__":
    main()

"""How long the dynamic program takes on large instances, how close it comes, and when it first has a plan and a bound.

    python tests/benchmarks/scale.py [--only NAME] [--seconds 60]

Every instance is solved in a process of its own. A row has the CPU seconds of the whole process, the wall-clock seconds
of the solver, the largest resident memory, the gap (with every shared resource to itself), and after how many seconds
there was a first plan, a first bound, and a gap of at most 1%.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.planning.settings import MAXIMUM_CUTS
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import dynamic_program

RATES = ((100e9, 1e-6), (12.5e9, 2e-6), (6e9, 3e-6))
"""Bandwidth in bytes/s and latency in seconds, by level."""


def chain(layers: int, seed: int = 0) -> Profile:
    """Layers in a row: 1.5 to 4.5 ms, 2 to 20 MB of parameters, 25 to 100 MB saved, 1 to 4 MB across."""
    rng = random.Random(seed)
    made = tuple(
        Layer(
            f"l{i}",
            rng.uniform(0.5, 1.5) * 1e-3,
            rng.uniform(1, 3) * 1e-3,
            int(rng.uniform(2e6, 20e6)),
            int(rng.uniform(25e6, 100e6)),
        )
        for i in range(layers)
    )
    tensors = tuple(
        Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), int(rng.uniform(1e6, 4e6)), 2_000_000) for i in range(layers - 1)
    )
    return Profile(layers=made, tensors=tensors, minibatch=1, optimizer_state_ratio=2.0)


def cluster(*counts: int, memory_gib: float = 80.0) -> Cluster:
    """Equal devices joined by levels of so many components, innermost first."""
    levels = tuple(Level(f"level{i}", count, *RATES[i]) for i, count in enumerate(counts))
    return Cluster("benchmark", Device("device", "cuda", int(memory_gib * 2**30)), levels)


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


def _asynchronous(schedule: str, accumulate: int | None = None) -> Options:
    return Options(contention=False, schedule=schedule, accumulate=accumulate)


def measure(name: str, seconds: float) -> None:
    """Solve an instance, and print its row."""
    make, gap = INSTANCES[name]
    problem = make()
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


def main() -> None:
    """Print a row for every instance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(INSTANCES))
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of each solve")
    given = parser.parse_args()
    if given.only:
        measure(given.only, given.seconds)
        return
    headings = f"{'CPU s':>7} {'wall s':>7} {'GiB':>6}  {'gap':>8}  {'plan':>8} {'bound':>8} {'1%':>8}"
    print(f"{'layers x workers':<23} {headings}", flush=True)
    for name in INSTANCES:
        subprocess.run([sys.executable, __file__, "--only", name, "--seconds", str(given.seconds)], check=True)


if __name__ == "__main__":
    main()

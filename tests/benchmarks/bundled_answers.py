"""Whether the answers for the bundled profiles on clusters A, B and C are proven with everything charged, and how fast.

    python tests/benchmarks/bundled_answers.py [--solver both|dp|ilp] [--time-limit SECONDS]

For every answer: the plan, its pace, the status of each solver with its gap, and the seconds of `pipeplan.solve` as a
whole, without the start of Python.
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.table import Table

from pipeplan.cluster_data import cluster_toml
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.result import Result
from pipeplan.util import files


def answers(settings: Settings) -> list[tuple[str, str, Outcome, float]]:
    """The profile, the cluster, the answer and its seconds, for all bundled profiles."""
    rows = []
    for path in sorted(files.bundled_folder("profiles").glob("*.json")):
        profile = Profile.load(path)
        for cluster in "ABC":
            problem = Problem(profile, cluster_toml.load_cluster(cluster), Options())
            began = time.perf_counter()
            outcome = solve(problem, settings)
            rows.append((path.stem, cluster, outcome, time.perf_counter() - began))
    return rows


def _state(results: tuple[Result, ...], solver: str) -> str:
    """The status of one solver, with its gap and its seconds."""
    for result in results:
        if result.solver.startswith(solver):
            gap = "" if result.gap < 1e-6 else f" {result.gap:.1%}"
            return f"{result.status}{gap}, {result.seconds:.1f} s"
    return "-"


def main() -> None:
    """Solve everything, and print one row for each answer and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solver", choices=("both", "dp", "ilp"), default="both")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds for each solver")
    chosen = parser.parse_args()
    settings = Settings(solver=chosen.solver)
    if chosen.time_limit is not None:
        settings = Settings(solver=chosen.solver, time_limit_s=chosen.time_limit)
    rows = answers(settings)
    table = Table("profile", "cluster", "plan", "ms", "DP", "ILP", "gap", "s")
    for name, cluster, outcome, seconds in rows:
        states = _state(outcome.results, "DP"), _state(outcome.results, "ILP")
        pace = f"{outcome.predicted_s * 1e3:.3f}"
        table.add_row(name, cluster, outcome.plan.config, pace, *states, f"{outcome.gap:.2%}", f"{seconds:.1f}")
    console = Console(width=150)
    console.print(table)
    proven = sum(outcome.gap < 1e-6 for _, _, outcome, _ in rows)
    both = sum(outcome.verdict.proven for _, _, outcome, _ in rows)
    slowest = max(seconds for *_, seconds in rows)
    console.print(f"{proven} of {len(rows)} proven, {both} of them by both solvers; the slowest took {slowest:.1f} s")


if __name__ == "__main__":
    main()

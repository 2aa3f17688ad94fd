"""How much a sweep of twenty points costs beside one solve of its unchanged problem, in seconds of processor time.

    python tests/benchmarks/sweeps.py [--only NAME] [--points 20]

The sweep multiplies the bandwidth between servers by 0.5 to 5. All points are solved in this process, one after
another, as by `pipeplan sweep --jobs 1`. Both leave the schedule to pipeplan. The solve is that of `pipeplan solve`
with the DP alone. There is no time limit, so that other load on the machine does not cut searches short.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

from pipeplan.api import cluster
from pipeplan.planning.choose_synchrony import BEST, GAIN, choose_synchrony
from pipeplan.planning.settings import Settings
from pipeplan.planning.simplest import WITHIN
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.profile_data.bundled import load_profile
from pipeplan.questions import SEARCH
from pipeplan.sweeps.points import SweepAxes, SweepPoint, sweep_points
from pipeplan.sweeps.sweep import solve_points
from pipeplan.util.deadline import Deadline

CASES = [("vgg16-v100", "A"), ("vgg16-v100", "B"), ("gnmt16-v100", "A"), ("gnmt16-v100", "B"), ("resnet50-v100", "A")]


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--points", type=int, default=20)
    arguments = parser.parse_args()
    for profile_name, cluster_name in CASES:
        name = f"{profile_name} on {cluster_name}"
        if arguments.only in name:
            solve_s, sweep_s = _measured(profile_name, cluster_name, arguments.points)
            print(
                f"{name:24} solve {solve_s:6.2f} s   sweep {sweep_s:7.2f} s   {sweep_s / solve_s:5.2f} solves",
                flush=True,
            )


def _measured(profile_name: str, cluster_name: str, points: int) -> tuple[float, float]:
    profile, machines = load_profile(profile_name), cluster(cluster_name)
    level = machines.levels[-1]
    rates = [level.bandwidth * (0.5 + 4.5 * number / max(1, points - 1)) for number in range(points)]
    grid = sweep_points(profile, [machines], Options(), SweepAxes({level.name: rates}, schedules=(BEST,)))
    solve_s = _processor_s(lambda: _solve(SweepPoint(profile, machines, Options(), chooses=True)))
    endless = replace(SEARCH, time_limit_s=None)
    return solve_s, _processor_s(lambda: solve_points(grid, endless, 1, lambda number, answer: None))


def _solve(point: SweepPoint) -> None:
    settings = Settings(solver="dp", simplest=WITHIN, time_limit_s=None)
    deadline = Deadline.after(settings.time_limit_s)
    shared = None, None, GAIN, settings.maximum_cuts, deadline.share(0.5)
    taken = choose_synchrony(point.profile, point.cluster, point.options, *shared, may_correct=True).taken
    solve(taken.problem, settings, deadline=deadline, known=(taken.plan,))


def _processor_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


if __name__ == "__main__":
    main()

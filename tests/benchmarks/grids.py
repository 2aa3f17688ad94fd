"""What a uniform grid loses against the free plan: bundled V100 profiles on clusters A, B and C of PipeDream's paper.

    python tests/benchmarks/grids.py [--only MODEL]

Asynchronous, as PipeDream trains, and synchronous with 16 minibatches per update, as Megatron-LM, DeepSpeed and
torchtitan do. Both plans are the dynamic program's, made better where network cards are shared; `pipeplan solve --grid`
has them proven by the integer program as well. The last two columns are what finding the two took, in CPU seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from pipeplan.cluster_data import cluster_toml
from pipeplan.cost.stage_times import grid_shape_of
from pipeplan.plan.schedules import FLUSH, STASHING
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files

SCHEDULES = {STASHING: None, FLUSH: 16}
DP = Settings(solver="dp", certify=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="profiles whose names contain this")
    only = parser.parse_args().only or ""
    print("| model | cluster | schedule | free plan | ms | uniform grid | ms | free is faster | CPU s | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    lost: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    for path in sorted(files.bundled_folder("profiles").glob("*-v100.json")):
        if only not in path.name:
            continue
        profile = Profile.load(path)
        for schedule, accumulate in SCHEDULES.items():
            for name in "ABC":
                options = Options(schedule=schedule, accumulate=accumulate)
                problem = Problem(profile, cluster_toml.load_cluster(name), options)
                free, took = _solved(problem)
                grid, grid_took = _solved(replace(problem, options=replace(options, grid=True)))
                shape = grid_shape_of(grid.plan, problem.cluster)
                gain = grid.predicted_s / free.predicted_s
                lost[schedule].append(gain)
                print(
                    f"| {path.stem.removesuffix('-v100')} | {name} | {schedule} | {free.plan.config} | "
                    f"{free.predicted_s * 1e3:.3g} | {shape.text if shape else '?'} | {grid.predicted_s * 1e3:.3g} | "
                    f"{gain:.2f}x | {took:.2f} | {grid_took:.2f} |",
                    flush=True,
                )
    for schedule, gains in lost.items():
        if gains:
            print(
                f"{schedule}: median {statistics.median(gains):.3f}x, worst {max(gains):.2f}x, "
                f"no loss in {sum(gain < 1.005 for gain in gains)} of {len(gains)}"
            )


def _solved(problem: Problem) -> tuple[Outcome, float]:
    began = time.thread_time()
    outcome = solve(problem, DP)
    return outcome, time.thread_time() - began


if __name__ == "__main__":
    main()

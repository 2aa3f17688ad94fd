"""The planner on PipeDream's published V100 profiles, beside the published figures.

    python tests/benchmarks/published_figures.py FOLDER

FOLDER holds the profiles, `pipedream/vgg16.txt` and so on (github.com/msr-fiddle/pipedream). First the published
optimiser's own figures, then the optima of pipeplan's model on cluster A with both
solvers, and the time each took.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from table1 import pipedream_optimiser

from pipeplan.cluster_data import cluster_toml as clusters
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.importers import pipedream
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem

# Published optimiser: profile, levels (count, bytes/s), seconds per minibatch, speed-up over its data parallelism.
CODE = [
    ("vgg16", [(16, 1.25e9)], 0.0547948908, 2.6608611367),
    ("vgg16", [(16, 3.125e9)], 0.0455248078, 1.8350588325),
    ("vgg16", [(4, 12e9)], 0.1700762187, 1.1919546283),
    ("vgg16", [(4, 12e9), (4, 1.25e9)], 0.0668887521, 1.9987711855),
    ("vgg16", [(8, 25e9), (2, 3.125e9)], 0.0657666867, 1.0493634699),
    ("alexnet", [(16, 1.25e9)], 0.0150994944, 3.3880732126),
    ("alexnet", [(16, 3.125e9)], 0.0062892600, 3.7624163080),
]
# Profile, minibatch measured, minibatch wanted.
MODELS = [("vgg16", 128, 64), ("resnet50", 128, 128), ("alexnet", 256, 256), ("gnmt8", 64, 64)]


def code_figures(folder: Path) -> Table:
    """The published optimiser's figures and ours."""
    table = Table("profile", "levels", "s/minibatch", "published", "over DP", "published", title="pipedream-code")
    for name, levels, pace, gain in CODE:
        made = tuple(Level(f"level{number}", *level) for number, level in enumerate(levels))
        problem = Problem(
            pipedream.read_pipedream_profile(folder / f"{name}.txt", 128), Cluster("", Device("", "cuda", 1), made)
        )
        result = pipedream_optimiser.solve_published(problem, enumerate_cuts(problem, 2000), "pipedream-code")
        ours = pipedream_optimiser.data_parallel_time(problem, "pipedream-code") / result.objective_s
        shape = " x ".join(f"{count} at {rate / 1e9:g} GB/s" for count, rate in levels)
        table.add_row(name, shape, f"{result.objective_s:.10f}", f"{pace:.10f}", f"{ours:.10f}", f"{gain:.10f}")
    return table


def optima(folder: Path) -> Table:
    """The optima on clusters A and B without a limit on memory, proven by both solvers."""
    headings = ("profile", "cluster", "plan", "s/minibatch", "over DP", "verdict", "DP s", "ILP s")
    table = Table(*headings, title="pipeplan: full overlap, a/B at a boundary, no limit on memory")
    for name, measured, minibatch in MODELS:
        for cluster in "AB":
            profile = pipedream.read_pipedream_profile(folder / f"{name}.txt", measured).rescaled(minibatch)
            problem = Problem(profile, clusters.load_cluster(cluster), Options(memory=False))
            outcome = solve(problem, Settings())
            pace = outcome.evaluation.pace_s
            gain = outcome.baselines[0].gain(pace)
            seconds = [f"{result.seconds:.2f}" for result in outcome.results]
            verdict = "proven" if outcome.verdict.proven else outcome.verdict.text
            table.add_row(name, cluster, outcome.plan.config, f"{pace:.7g}", f"{gain:.4f}", verdict, *seconds)
    return table


def main() -> None:
    """Print both tables."""
    if len(sys.argv) != 2 or not (folder := Path(sys.argv[1]) / "pipedream").is_dir():
        sys.exit(__doc__)
    console = Console()
    console.print(code_figures(folder))
    console.print(optima(folder))


if __name__ == "__main__":
    main()

"""How often a network card binds, and how much of the loss the best plan with shared cards avoids.

    python tests/benchmarks/contention.py [FOLDER]

FOLDER (or PIPEPLAN_REFERENCE) holds PipeDream's published profiles, `pipedream/vgg16.txt` and so on
(github.com/msr-fiddle/pipedream); without them the bundled VGG-16 is planned alone. For clusters A and B, without a
limit on memory: the plan that is best with every link alone and its pace, its pace with contention and the card that
binds, and the best plan with shared cards charged. The loss is relative to the pace with every link alone, which bounds
all plans. Then how often a card binds on random chains, by how many servers and how much traffic there is.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeplan.cluster_data import cluster_toml as clusters
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.importers import pipedream
from pipeplan.plan.plan import Plan
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import dynamic_program
from pipeplan.util import files

# Profile, minibatch measured, minibatch wanted.
PUBLISHED = [("vgg16", 128, 64), ("resnet50", 128, 128), ("alexnet", 256, 256), ("gnmt8", 64, 64), ("gnmt16", 64, 64)]
DRAWS = 40


def profiles() -> Iterator[tuple[str, Profile]]:
    """The published profiles where they are, else the bundled one."""
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PIPEPLAN_REFERENCE", "")
    folder = Path(given) / "pipedream"
    if given and folder.is_dir():
        for name, measured, minibatch in PUBLISHED:
            yield (
                f"{name}, {minibatch}",
                pipedream.read_pipedream_profile(folder / f"{name}.txt", measured).rescaled(minibatch),
            )
    else:
        yield "vgg16, bundled", Profile.load(files.bundled_folder("profiles") / "vgg16-v100.json")


def best_plan(problem: Problem, *, contention: bool) -> Plan:
    """The plan that the dynamic program proves best, with shared cards charged or with every link alone."""
    problem = replace(problem, options=replace(problem.options, contention=contention))
    plan = dynamic_program.solve(problem, enumerate_cuts(problem, 2000)).plan
    assert plan is not None, "without a limit on memory there is a plan"
    return plan


def published() -> Table:
    """The published models on clusters A and B."""
    headings = ("profile", "cluster", "plan", "alone", "shared", "bound by", "best shared", "pace", "loss", "s")
    table = Table(*headings, title="pace in ms, with every link alone and with shared cards")
    for name, profile in profiles():
        for cluster in "AB":
            problem = Problem(profile, clusters.load_cluster(cluster), Options(memory=False))
            plan = best_plan(problem, contention=False)
            score, began = evaluate(plan, problem), time.perf_counter()
            better = best_plan(problem, contention=True)
            seconds, found = time.perf_counter() - began, evaluate(better, problem)
            paces = [f"{value * 1e3:.3f}" for value in (score.alone_s, score.pace_s, found.pace_s)]
            gap = f"{found.pace_s / score.alone_s - 1:.1%}"
            shown = better.config if better != plan else "the same"
            table.add_row(name, cluster, plan.config, *paces[:2], score.bound, shown, paces[2], gap, f"{seconds:.2f}")
    return table


def chain(rng: random.Random, traffic: float, servers: int) -> Problem:
    """A chain of 12 layers on servers of 4. `traffic`: the mean time of a boundary between servers over the pace."""
    times = [rng.uniform(0.5, 1.5) for _ in range(12)]
    pace_s = 3 * sum(times) / (4 * servers)
    layers = tuple(Layer(f"l{i}", t, 2 * t, int(5e7 * rng.choice([1, 3, 10, 30])), 0) for i, t in enumerate(times))
    sizes = [int(rng.uniform(0.5, 1.5) * traffic * pace_s * 1e8) for _ in times[1:]]
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), size, size) for i, size in enumerate(sizes))
    levels = (Level("server", 4, 1e9), Level("cluster", servers, 1e8))
    return Problem(Profile(layers, tensors, 1), Cluster("", Device("", "cuda", 1), levels), Options(memory=False))


def drawn() -> Table:
    """Random chains: how often contention slows the plan that is best alone and that which is best with it, and by how
    much."""
    headings = ("servers", "traffic", "binds", "mean loss", "worst", "best shared: binds", "mean loss", "worst")
    table = Table(*headings, title=f"{DRAWS} random chains each")
    for servers in (2, 4, 8):
        for traffic in (0.3, 0.6, 1.0):
            losses: list[tuple[float, float]] = []
            for seed in range(DRAWS):
                problem = chain(random.Random(seed), traffic, servers)
                plans = [best_plan(problem, contention=shared) for shared in (False, True)]
                bound_s = evaluate(plans[0], problem).alone_s
                before, after = (evaluate(plan, problem).pace_s / bound_s - 1 for plan in plans)
                losses.append((before, after))
            row = [f"{servers}", f"{traffic:g}"]
            for column in zip(*losses, strict=True):
                row += [f"{sum(loss > 1e-6 for loss in column)}", f"{sum(column) / DRAWS:.1%}", f"{max(column):.1%}"]
            table.add_row(*row)
    return table


def main() -> None:
    """Print both tables."""
    console = Console(width=150)
    console.print(published())
    console.print(drawn())


if __name__ == "__main__":
    main()

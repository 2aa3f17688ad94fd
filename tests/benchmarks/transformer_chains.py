"""How close random transformers on 16 to 512 GPUs come to a proven plan within a time limit, under all
schedules but those with several stages on a worker.

    python tests/benchmarks/transformer_chains.py [--count 70] [--first 0] [--seconds 20] [--cpu] [--solver dp|both]

A chain has 24 to 200 blocks of two layers between an embedding and a head, on two or three levels of links. A GPU has
12 to 70% of the memory that one worker would need for everything. A row has what is asked, the plan, its gap with
everything charged, the CPU seconds of the process, and whether a plan was known after one second. With `--cpu` the
limit and that second are CPU seconds, for a machine that has other work; HiGHS alone still goes by the clock.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InfeasibleError
from pipeplan.plan.schedules import ACCUMULATING, SCHEDULES, VIRTUAL
from pipeplan.planning.settings import Settings, SolveProgress
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

MIB, GIB = 2**20, 2**30


def transformer(rng: random.Random, blocks: int) -> Profile:
    """An embedding, blocks of attention and MLP, and a head, with weights and times of one hidden size each."""
    hidden = rng.choice((1024, 2048, 4096, 5120))
    tokens = rng.choice((1024, 2048, 4096))
    flops_s = 120e12
    crossing = 2 * tokens * hidden
    layers = [Layer("embedding", 1e-5, 2e-5, 2 * 50_000 * hidden, crossing)]
    for block in range(blocks):
        for name, weights in (("attention", 4 * hidden**2), ("mlp", 8 * hidden**2)):
            forward_s = 2 * weights * tokens / flops_s * rng.uniform(0.97, 1.03)
            layers.append(Layer(f"{name}{block}", forward_s, 2 * forward_s, 2 * weights, 6 * crossing))
    head_s = 2 * 50_000 * hidden * tokens / flops_s
    layers.append(Layer("head", head_s, 2 * head_s, 2 * 50_000 * hidden, 2 * 50_000 * tokens))
    tensors = tuple(
        Tensor(f"t{one.name}", one.name, (following.name,), crossing, crossing)
        for one, following in itertools.pairwise(layers)
    )
    return Profile(layers=tuple(layers), tensors=tensors, minibatch=1, optimizer_state_ratio=6.0)


def instance(seed: int) -> Problem:
    """A problem drawn by a seed."""
    rng = random.Random(seed)
    profile = transformer(rng, rng.randint(24, 200))
    inner, outer = Level("server", 8, 250e9, 5e-6), (12.5e9, 10e-6)
    servers = rng.choice((2, 4, 8, 16, 32, 64))
    if servers >= 8 and rng.random() < 0.5:
        levels = (inner, Level("rack", servers // 4, 25e9, 8e-6), Level("cluster", 4, *outer))
    else:
        levels = (inner, Level("cluster", servers, *outer))
    everything = sum(layer.parameter_bytes * (2 + profile.optimizer_state_ratio) for layer in profile.layers)
    everything += sum(layer.saved_bytes for layer in profile.layers)
    memory = int(rng.uniform(0.12, 0.70) * everything)
    cluster = Cluster("drawn", Device("GPU", "cuda", memory), levels)
    schedule = rng.choice([name for name in SCHEDULES if name not in VIRTUAL])
    accumulate = rng.choice((8, 16, 32, 64)) if schedule in ACCUMULATING else None
    return Problem(profile, cluster, Options(schedule=schedule, accumulate=accumulate, overlap=1.0))


@dataclass(frozen=True)
class Solved:
    """The answer to one instance."""

    text: str
    gap: float | None
    """Relative; None where no plan was found."""
    cpu_s: float
    after_a_second: bool


def solved(seed: int, seconds: float, solver: str, cpu_limit: bool) -> Solved:
    """Solve the instance of a seed within a limit of wall-clock seconds, or of CPU seconds, in a process of its own."""
    if cpu_limit:
        time.perf_counter = time.process_time  # the clock of all deadlines
    problem = instance(seed)
    began, cpu = time.perf_counter(), time.process_time()
    first: list[float] = []

    def report(state: SolveProgress) -> None:
        if state.best_s is not None and not first:
            first.append(time.perf_counter() - began)

    asked = f"{len(problem.units):>4} layers  {problem.cluster.workers:>4} GPUs  {problem.options.schedule:<14}"
    try:
        outcome = solve(problem, Settings(solver=solver, time_limit_s=seconds), report=report)
    except InfeasibleError as error:
        # That nothing fits is an answer, and as good as proven; that time was short is none.
        short = "time limit" in str(error)
        return Solved(f"{asked} {str(error)[:60]}", None if short else 0.0, time.process_time() - cpu, not short)
    known = bool(first) and first[0] <= 1.0
    cpu_s = time.process_time() - cpu
    text = f"{asked} {outcome.plan.config[:40]:<40} gap {outcome.gap:8.4%}  {cpu_s:6.1f} CPU s"
    return Solved(text, outcome.gap, cpu_s, known)


def main() -> None:
    """Solve all instances and print a row for each, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=70)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--solver", choices=("dp", "ilp", "both"), default="dp")
    parser.add_argument("--jobs", type=int, default=1, help=f"processes at a time, of {os.cpu_count()} cores")
    parser.add_argument("--cpu", action="store_true", help="limit CPU seconds in place of wall-clock seconds")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.count)
    rows = []
    with ProcessPoolExecutor(given.jobs, max_tasks_per_child=1) as pool:
        settings = [given.seconds], [given.solver], [given.cpu]
        for row in pool.map(solved, seeds, *(values * len(seeds) for values in settings)):
            print(f"{seeds[len(rows)]:>4}  {row.text}", flush=True)
            rows.append(row)
    close = [row for row in rows if row.gap is not None and row.gap <= 1e-2]
    proven = [row for row in close if row.gap is not None and row.gap <= 1e-6]
    unsolved, quick = sum(row.gap is None for row in rows), sum(row.after_a_second for row in rows)
    print(
        f"{len(rows)} instances within {given.seconds:g} s each: {len(proven)} proven, {len(close)} within 1%, "
        f"{unsolved} without a plan; {quick} had an answer after a second; "
        f"median {statistics.median(row.cpu_s for row in rows):.1f} CPU s"
    )


if __name__ == "__main__":
    main()

"""How close the solvers come to a proven plan, and how long they take: random transformers, the bundled profiles,
synchronous schedules, and large instances.

    python tests/benchmarks/proofs.py [dp] [--count 70] [--first 0] [--seconds 20] [--jobs 1]
    python tests/benchmarks/proofs.py ilp [--count 70] [--workers 64] [--seconds 8]
    python tests/benchmarks/proofs.py bundled [--seconds 20]
    python tests/benchmarks/proofs.py schedules [--seconds 40]
    python tests/benchmarks/proofs.py scale [--only NAME] [--seconds 60]

`dp`: random transformers of 24 to 200 blocks on 16 to 512 GPUs, on two or three levels of links, under all schedules
but those with several stages on a worker. A GPU has 12 to 70% of the memory that one worker would need for everything.
A row has what is asked, the plan, its gap with everything charged, CPU seconds, and at the end how many had an answer
after one second. `ilp`: the same with up to so many workers, by the integer program, below the step time of the plan
that the dynamic program finds in 20 s. `bundled`: the answers for the bundled profiles on clusters A, B and C.
`schedules`: the candidates for two transformers on A100s, with simulated throughput and memory. `scale`: the dynamic
program on large instances, each in a process of its own. A row has the CPU seconds of the whole process, the wall-clock
seconds of the solver, the largest resident memory, the gap (with every shared resource to itself), and after how many
seconds there was a first plan, a first bound, and a gap of at most 1%.

Limits of `dp` and `ilp` are CPU seconds; HiGHS alone goes by the clock.
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from pipeplan.api import cluster, read_profile
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError, NotFoundInTimeError
from pipeplan.plan.schedules import ACCUMULATING, SCHEDULES, VIRTUAL
from pipeplan.planning.choose import choose
from pipeplan.planning.question import Machines, Question
from pipeplan.planning.settings import MAXIMUM_CUTS, Settings, SolveProgress
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.result import Result
from pipeplan.util import files
from pipeplan.util.deadline import Deadline
from pipeplan.util.units import show_size

DP_S = 20.0
"""Seconds of the dynamic program for a chain of `ilp`."""


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
    drawn = Cluster("drawn", Device("GPU", "cuda", memory), levels)
    schedule = rng.choice([name for name in SCHEDULES if name not in VIRTUAL])
    accumulate = rng.choice((8, 16, 32, 64)) if schedule in ACCUMULATING else None
    return Problem(profile, drawn, Options(schedule=schedule, accumulate=accumulate, overlap=1.0))


@dataclass(frozen=True)
class Solved:
    """The answer to one instance."""

    text: str
    gap: float | None
    """Relative; None where no plan was found."""
    cpu_s: float
    after_a_second: bool


def solved(seed: int, seconds: float) -> Solved:
    """Solve the instance of a seed within CPU seconds, in a process of its own."""
    time.perf_counter = time.process_time  # the clock of all deadlines
    problem = instance(seed)
    began, cpu = time.perf_counter(), time.process_time()
    first: list[float] = []

    def report(state: SolveProgress) -> None:
        if state.best_s is not None and not first:
            first.append(time.perf_counter() - began)

    asked = f"{len(problem.units):>4} layers  {problem.cluster.workers:>4} GPUs  {problem.options.schedule:<14}"
    try:
        outcome = solve(problem, Settings(solver="dp", time_limit_s=seconds), report=report)
    except (InfeasibleError, NotFoundInTimeError) as error:
        # That nothing fits is an answer, and as good as proven; that time was short is none.
        short = isinstance(error, NotFoundInTimeError)
        return Solved(f"{asked} {str(error)[:60]}", None if short else 0.0, time.process_time() - cpu, not short)
    known = bool(first) and first[0] <= 1.0
    cpu_s = time.process_time() - cpu
    text = f"{asked} {outcome.plan.config[:40]:<40} gap {outcome.gap:8.4%}  {cpu_s:6.1f} CPU s"
    return Solved(text, outcome.gap, cpu_s, known)


def by_dp(given: argparse.Namespace) -> None:
    """Solve all instances and print a row for each, and a summary."""
    seeds = range(given.first, given.first + given.count)
    rows = []
    with ProcessPoolExecutor(given.jobs, max_tasks_per_child=1) as pool:
        for row in pool.map(solved, seeds, [given.seconds] * len(seeds)):
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


def by_ilp(given: argparse.Namespace) -> None:
    """Print a row for each chain, and a summary."""
    time.perf_counter = time.process_time  # the clock of all deadlines
    limits = integer_program.IlpLimits(seconds=given.seconds)
    gaps: list[float] = []
    proven = 0
    for seed in range(given.first, given.first + given.count):
        problem = instance(seed)
        if problem.cluster.workers > given.workers:
            continue
        first = dynamic_program.solve(problem, enumerate_cuts(problem, MAXIMUM_CUTS), DP_S)
        step_time_s = evaluate(first.plan, problem).step_time_s if first.plan else None
        began = time.process_time()
        result = integer_program.solve(problem, limits, step_time_s)
        spent_s = time.process_time() - began
        best_s = min(step_time_s or float("inf"), result.objective_s)
        gaps.append(max(0.0, 1.0 - result.bound_s / best_s))
        proven += result.status == ("infeasible" if step_time_s is None else "optimal")
        asked = f"{len(problem.units):>4} layers {problem.cluster.workers:>3} GPUs {problem.options.schedule:<13}"
        config = first.plan.config if first.plan else "the DP has no plan"
        print(
            f"{seed:>3} {asked} {config[:32]:<32} gap {gaps[-1]:7.3%} {spent_s:6.1f} CPU s {result.status}", flush=True
        )
    print(f"{len(gaps)} chains: {proven} proven, {sum(gap <= 0.01 for gap in gaps)} with a gap of at most 1%")


def by_bundled(given: argparse.Namespace) -> None:
    """Print a row for each answer, and a summary."""
    table = Table("profile", "cluster", "plan", "ms", "DP", "ILP", "gap", "s")
    outcomes, slowest = [], 0.0
    for path in sorted(files.bundled_folder("profiles").glob("*.json")):
        for place in "ABC":
            began = time.perf_counter()
            problem = Problem(read_profile(path), cluster(place), Options())
            outcome = solve(problem, Settings(time_limit_s=given.seconds))
            seconds = time.perf_counter() - began
            states = _state(outcome.results, "DP"), _state(outcome.results, "ILP")
            figures = f"{outcome.predicted_s * 1e3:.3f}", *states, f"{outcome.gap:.2%}", f"{seconds:.1f}"
            table.add_row(path.stem, place, outcome.plan.config, *figures)
            outcomes.append(outcome)
            slowest = max(slowest, seconds)
    console = Console(width=150)
    console.print(table)
    proven, both = sum(one.gap < 1e-6 for one in outcomes), sum(one.verdict.proven for one in outcomes)
    console.print(
        f"{proven} of {len(outcomes)} proven, {both} of them by both solvers; the slowest took {slowest:.1f} s"
    )


def _state(results: tuple[Result, ...], solver: str) -> str:
    """The status of one solver, with its gap and its seconds."""
    for result in results:
        if result.solver.startswith(solver):
            gap = "" if result.gap < 1e-6 else f" {result.gap:.1%}"
            return f"{result.status}{gap}, {result.seconds:.1f} s"
    return "-"


FLOPS = 1.5e14
"""Operations in a second."""


def even_transformer(name: str, blocks: int, width: int, words: int, tokens: int) -> Profile:
    """A chain in bfloat16, one sample a minibatch, with fp32 weights and moments of Adam as the optimiser's state."""
    block_s, edge = 2 * 12 * width * width * tokens / FLOPS, tokens * width * 2
    head_s = 2 * words * width * tokens / FLOPS
    layers = [Layer("embed", 1e-4, 3e-4, words * width * 2, edge)]
    for number in range(blocks):
        layers.append(Layer(f"{number}.attend", block_s / 3, block_s * 2 / 3, 8 * width * width, 11 * edge))
        layers.append(Layer(f"{number}.mlp", block_s * 2 / 3, block_s * 4 / 3, 16 * width * width, 23 * edge))
    layers.append(Layer("head", head_s, 2 * head_s, words * width * 2, edge + 4 * tokens * words))
    tensors = (Tensor(one.name, one.name, (other.name,), edge, edge) for one, other in itertools.pairwise(layers))
    return Profile(
        layers=tuple(layers), tensors=tuple(tensors), minibatch=1, optimizer_state_ratio=6.0, model_name=name
    )


def by_schedules(given: argparse.Namespace) -> None:
    """Print the candidates."""
    table = Table("model, workers, batch", "s", "candidate", "plan", "microbatch", "samples/s", "memory")
    cases = (
        (even_transformer("Llama 7B", 32, 4096, 32000, 2048), 4),
        (even_transformer("GPT-2 XL", 48, 1600, 50257, 1024), 8),
    )
    for (profile, servers), batch in itertools.product(cases, (64, 256)):
        levels = (Level("server", 8, 250e9), Level("cluster", servers, 25e9))
        place, begun = Cluster("a100", Device("A100", "cuda", 80 * 2**30), levels), time.perf_counter()
        choice = choose(Question(Machines(profile, place), Options(), batch), Deadline.after(given.seconds))
        took = f"{time.perf_counter() - begun:.1f}"
        for number, one in enumerate(choice.rivals):
            first = (f"{profile.model_name}, {servers} × 8, {batch}", took) if number == 0 else ("", "")
            memory = show_size(max(stage.memory_bytes for stage in evaluate(one.plan, one.problem).stages))
            size, rate = str(one.problem.profile.minibatch), f"{1 / one.sample_s:.1f}"
            taken = " (taken)" if one is choice.taken else ""
            table.add_row(*first, f"{one.kind}{taken}", one.plan.config, size, rate, memory)
        table.add_section()
    Console(width=150).print(table)


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


def even_cluster(*counts: int, memory_gib: float = 80.0) -> Cluster:
    """Equal devices joined by levels of so many components, innermost first."""
    levels = tuple(Level(f"level{i}", count, *RATES[i]) for i, count in enumerate(counts))
    return Cluster("benchmark", Device("device", "cuda", int(memory_gib * 2**30)), levels)


PLAIN, KEEPING = Options(contention=False), Options(contention=False, recompute=False)
FLUSH = Options(contention=False, schedule="1f1b-flush", accumulate=64)
INSTANCES: dict[str, tuple[Callable[[], Problem], float]] = {
    "1,000 x 4,096": (lambda: Problem(chain(1000), even_cluster(8, 512, memory_gib=110), KEEPING), 0.0),
    "3,000 x 16,384": (lambda: Problem(chain(3000), even_cluster(8, 32, 64, memory_gib=1000), PLAIN), 0.0),
    "2,000 x 131,072 to 1%": (lambda: Problem(chain(2000), even_cluster(8, 128, 128, memory_gib=110), KEEPING), 0.01),
    "203 x 512, flush": (lambda: Problem(chain(203), even_cluster(8, 64), FLUSH), 0.01),
    "403 x 16, tight": (lambda: Problem(chain(403), even_cluster(8, 2, memory_gib=12), PLAIN), 0.0),
    "403 x 16, vertical": (
        lambda: Problem(chain(403), even_cluster(8, 2, memory_gib=20), _asynchronous("vertical-sync")),
        0.01,
    ),
}
"""By name: the layers times the workers, and the gap that is enough. The memory binds, except on 16,384 workers."""


def _asynchronous(schedule: str, accumulate: int | None = None) -> Options:
    return Options(contention=False, schedule=schedule, accumulate=accumulate)


def print_scale(name: str, seconds: float) -> None:
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


def by_scale(given: argparse.Namespace) -> None:
    """Print a row for every large instance."""
    if given.only:
        print_scale(given.only, given.seconds)
        return
    headings = f"{'CPU s':>7} {'wall s':>7} {'GiB':>6}  {'gap':>8}  {'plan':>8} {'bound':>8} {'1%':>8}"
    print(f"{'layers x workers':<23} {headings}", flush=True)
    for name in INSTANCES:
        command = [sys.executable, __file__, "scale", "--only", name, "--seconds", str(given.seconds)]
        subprocess.run(command, check=True)


KINDS: Mapping[str, tuple[Callable[[argparse.Namespace], None], float]] = {
    "dp": (by_dp, 20.0),
    "ilp": (by_ilp, 8.0),
    "bundled": (by_bundled, 20.0),
    "schedules": (by_schedules, 40.0),
    "scale": (by_scale, 60.0),
}
"""What prints each kind of table, and the seconds of each solve."""


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="dp")
    parser.add_argument("--count", type=int, default=70, help="of random transformers")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=64, help="the most workers of a chain for `ilp`")
    parser.add_argument("--only", choices=tuple(INSTANCES), help="the instance of `scale`")
    parser.add_argument("--seconds", type=float, help="limit of each solve")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    given = parser.parse_args()
    work, usual_s = KINDS[given.kind]
    given.seconds = given.seconds or usual_s
    work(given)


if __name__ == "__main__":
    main()

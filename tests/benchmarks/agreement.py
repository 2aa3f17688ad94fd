"""Does a plan run at the step time that the formulas promise? Every schedule, replayed in the simulator, against
`evaluate`.

    python tests/benchmarks/agreement.py [PLANS]
    python tests/benchmarks/agreement.py bundled [MODEL …]

The first form: random plans (PLANS of each kind, else 100) with up to 4 stages of up to 4 replicas, one layer each,
links that nothing else shares, depths as the planner gives them. Transfers take up to 0.5 of a balanced step time, the
all-reduce of a stage up to its share of the step time for each minibatch that it is for. The share is replayed over
predicted, minus 1.

The second form: the best plans of bundled profiles by the formulas alone, on clusters A and B, for every schedule, with
32 minibatches per update, and with everything charged; beside each plain data parallelism and the best uniform grid.
All figures are seconds over the predicted step time of the best plan (two minutes).
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys

from rich.console import Console
from rich.table import Table

from pipeplan.api import cluster, read_profile
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.from_options.option_fields import options_for
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import ACCUMULATING, FLUSHING, SCHEDULES, VIRTUAL
from pipeplan.planning.baselines import UNIFORM_GRID
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.metrics import enough_minibatches, summarise_simulation

KINDS = ("one stage", "straight", "balanced, replicas fall and divide M", "balanced", "any")
SINGLE = tuple(name for name in SCHEDULES if name not in VIRTUAL)
"""The schedules with one stage on a worker."""
ENOUGH = 10**6
MODELS = ("vgg16", "resnet50", "gnmt8", "awd-lm", "s2vt")
M = 32
"""Minibatches per update of the bundled profiles' plans."""


def sample(kind: str, schedule: str, random_: random.Random) -> tuple[Plan, Problem]:
    """A random plan of a kind, with the problem that it is for; a layer's bytes are seconds of its link."""
    replicas = _replicas(kind, random_)
    even = kind.startswith("balanced")
    layers, tensors = [], []
    accumulate = random_.choice((8, 16, 32)) if schedule in FLUSHING else 4 * sum(replicas) + random_.randint(0, 16)
    for index, count in enumerate(replicas):
        work = count * (1.0 if even else random_.uniform(0.3, 1.0))
        forward = work * (1 / 3 if even else random_.uniform(0.2, 0.5))
        group = accumulate if schedule in ACCUMULATING else count
        allreduce = random_.choice((0.0, 0.3, 1.0)) * random_.random() * group
        ring = 2 * (count - 1) / count
        parameters = round(1e9 * allreduce / ring) if count > 1 else 0
        layers.append(Layer(f"l{index}", forward, work - forward, parameters, 1))
        if index + 1 < len(replicas):
            sizes = (round(1e9 * random_.choice((0.0, 0.1, 0.5)) * random_.random()) for _ in range(2))
            tensors.append(Tensor(f"t{index}", f"l{index}", (f"l{index + 1}",), *sizes))
    cluster = Cluster("flat", Device("d", "cuda", 1), (Level("all", sum(replicas), 1e9),))
    options = Options(schedule=schedule, accumulate=accumulate, contention=False, memory=False)
    problem = Problem(Profile(layers=tuple(layers), tensors=tuple(tensors), minibatch=1), cluster, options)
    return _with_depths(replicas, problem), problem


def _replicas(kind: str, random_: random.Random) -> list[int]:
    if kind == "one stage":
        return [random_.randint(1, 8)]
    stages = random_.randint(2, 4)
    if kind == "straight":
        return [1] * stages
    if "divide" in kind:
        return sorted((random_.choice((1, 2, 4)) for _ in range(stages)), reverse=True)
    return [random_.randint(1, 4) for _ in range(stages)]


def _with_depths(replicas: list[int], problem: Problem) -> Plan:
    """The plan with the planner's depths for the step time that all else allows."""
    stages, first = [], 0
    for index, count in enumerate(replicas):
        stages.append(Stage((f"l{index}",), tuple(range(first, first + count)), ENOUGH, 1))
        first += count
    schedule = problem.options.schedule
    plan = Plan(
        tuple(stages),
        schedule=schedule,
        accumulate=problem.options.accumulate if schedule in ACCUMULATING else None,
    )
    score = evaluate(plan, problem)
    step_time = score.step_time_s
    if schedule not in FLUSHING:
        step_time = max(max(stage.stage_s, stage.boundary_s) for stage in score.stages)
    return depths.assign_depths(plan, problem, step_time)


def difference(plan: Plan, problem: Problem) -> float:
    """Replayed over predicted step time, minus 1."""
    return simulated_s(plan, problem) / evaluate(plan, problem).step_time_s - 1.0


def simulated_s(plan: Plan, problem: Problem) -> float:
    """Replayed step time, in seconds per minibatch."""
    scenario = scenario_of_plan(plan, problem, evaluate(plan, problem))
    count = enough_minibatches(scenario)
    steady = summarise_simulation(scenario, simulate_schedule(scenario, count), count).steady
    assert steady is not None
    return steady.step_time_s


def print_bundled(names: list[str]) -> None:
    """Print the table of the bundled profiles."""
    shown = ("simulated", "data parallelism, predicted", "simulated", "uniform grid, predicted", "simulated")
    table = Table("model", "cluster", "schedule", "plan", "predicted", *shown)
    for name, place, schedule in itertools.product(names, "AB", SINGLE):
        options = options_for("cuda", schedule=schedule, accumulate=M if schedule in ACCUMULATING else None)
        problem = Problem(read_profile(f"{name}-v100"), cluster(place), options)
        outcome = solve(problem, Settings(solver="dp", certify=False, simulate=False))
        step_time = outcome.objective_s
        row = [f"{simulated_s(outcome.plan, problem) / step_time:.2f}"]
        found = {baseline.name: baseline for baseline in outcome.baselines}
        for baseline in (found["data parallelism"], found[UNIFORM_GRID]):
            known = baseline.plan is not None and baseline.step_time_s is not None and not baseline.remark
            step_times = (baseline.step_time_s, simulated_s(baseline.plan, problem)) if known and baseline.plan else ()
            row += [f"{seconds / step_time:.2f}" for seconds in step_times if seconds] or ["-", "-"]
        table.add_row(name, place, schedule, outcome.plan.config, f"{1e3 * step_time:.1f} ms", *row)
    Console(width=160).print(table)


def print_random(count: int) -> None:
    """Print the table of random plans: the replayed step time over the formula."""
    table = Table("schedule", "plans", "number", "least", "median", "most", "within 1%")
    for schedule, kind in itertools.product(SINGLE, KINDS):
        random_ = random.Random(7)
        plans = [sample(kind, schedule, random_) for _ in range(count)]
        plans = [one for one in plans if all(math.isfinite(stage.depth_s) for stage in evaluate(*one).stages)]
        found = [difference(*one) for one in plans]
        shares = (f"{100 * share:+.1f}%" for share in (min(found), statistics.median(found), max(found)))
        near = sum(abs(share) <= 0.01 for share in found) / len(found)
        table.add_row(schedule, kind, str(len(found)), *shares, f"{near:.0%}")
    Console(width=120).print(table)


def main() -> None:
    """Print the table that was asked for."""
    words = sys.argv[1:]
    if words[:1] == ["bundled"]:
        print_bundled(words[1:] or list(MODELS))
        return
    print_random(int(words[0]) if words else 100)


if __name__ == "__main__":
    main()

"""Does a plan run at the step time that the formulas promise? Replayed in the simulator, and over shaped links.

    python tests/benchmarks/agreement.py [--plans 100]
    python tests/benchmarks/agreement.py bundled [MODEL …]
    python tests/benchmarks/agreement.py drawn [--plans 60] [--seed 1] [--replay FOLDER]

The first form: random plans, so many of each kind, with up to 4 stages of up to 4 replicas, one layer each, links that
nothing else shares, depths as the planner gives them. Transfers take up to 0.5 of a balanced step time, the all-reduce
of a stage up to its share of the step time for each minibatch that it is for. The share is replayed over predicted,
minus 1.

The second form: the best plans of bundled profiles by the formulas alone, on clusters A and B, for every schedule, with
32 minibatches per update, and with everything charged; beside each plain data parallelism and the best uniform grid.
All figures are seconds over the predicted step time of the best plan (two minutes).

The third form draws a bundled model, a cluster, a schedule, minibatches per update and constraints; a plan is the
answer of `pipeplan solve --solver dp` within them. Constraints make plans that are rarely the best: few replicas, a
fixed number of stages, copies of the pipeline, slower links. The table has three ratios, less one: the step time of the
answer over that of the formulas, the replayed one over that of the formulas, and the replayed one over that of the
answer, which is above 0 where a plan is slower than its answer says. The first part takes some minutes. A replay takes
about a minute; its results are kept in FOLDER, where the command goes on. It needs
PYTHONPATH=tests/support:tests/evaluation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeplan.api import cluster, read_profile
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.variants import with_faster_links
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import PipeplanError
from pipeplan.from_options.option_fields import options_for
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import ACCUMULATING, FLUSHING, SCHEDULES, VIRTUAL
from pipeplan.planning.baselines import UNIFORM_GRID
from pipeplan.planning.outcome import Outcome
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
DRAWN_MODELS = ("vgg16", "resnet50", "alexnet", "gnmt8", "gnmt16", "awd-lm", "s2vt")
WITHIN = 0.10
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


@dataclass(frozen=True)
class Drawn:
    """A plan that was drawn, with its outcome."""

    number: int
    model: str
    place: str
    outcome: Outcome

    @property
    def words(self) -> str:
        """The plan in a few words."""
        options, plan = self.outcome.problem.options, self.outcome.plan
        often = f" M={plan.accumulate}" if plan.accumulate else ""
        return f"{self.model:<9}{self.place:<9}{plan.config:<16}{options.schedule}{often}"


def draw(seed: int, number: int) -> Drawn | None:
    """One plan; None where the constraints allow none."""
    rng = random.Random(f"{seed} {number}")
    model, name, schedule = rng.choice(DRAWN_MODELS), rng.choice("AB"), rng.choice(SCHEDULES)
    factor = rng.choice((1.0, 1.0, 0.5, 0.25))
    accumulate = rng.choice((8, 16, 32)) if schedule in ACCUMULATING else None
    constraints = rng.choice(
        ({}, {"stages": rng.randint(2, 5)}, {"max_replicas": rng.choice((2, 4, 8))}, {"max_stages": 2})
    )
    options = options_for("cuda", schedule=schedule, accumulate=accumulate, **constraints)
    whole = cluster(name)
    slower = whole if factor == 1 else with_faster_links(whole, len(whole.levels) - 1, factor)
    problem = Problem(read_profile(f"{model}-v100"), slower, options)
    try:
        outcome = solve(problem, Settings(solver="dp", certify=False))
    except PipeplanError:
        return None
    return Drawn(number, model, name if factor == 1 else f"{name}/{1 / factor:.0f}", outcome)


def replayed(drawn: Drawn, folder: Path) -> float:
    """The replayed step time over that of the formulas, less one; kept in the folder, for the same plan and
    prediction.
    """
    from replay import replay_plan

    from pipeplan.rendering import plan_folder

    known, plan = folder / f"{drawn.number}.json", folder / f"plan-{drawn.number}"
    depths = [stage.depth for stage in drawn.outcome.plan.stages]
    evaluated = {"plan": drawn.words, "depths": depths, "evaluated_s": drawn.outcome.objective_s}
    kept = json.loads(known.read_text()) if known.exists() else {}
    if any(kept.get(key) != value for key, value in evaluated.items()):
        shutil.rmtree(plan, ignore_errors=True)  # An interrupted replay, or one of another plan, has left it.
        plan_folder.write_plan(drawn.outcome, plan)
        result = replay_plan(plan, drawn.outcome.problem.profile)
        kept = evaluated | {"measured_s": result.measured_s, "predicted_s": result.predicted_s}
        known.write_text(json.dumps(kept))
    return float(kept["measured_s"] / kept["evaluated_s"] - 1)


def summary(kind: str, errors: Sequence[float]) -> str:
    """The errors in one line."""
    sizes = [abs(error) for error in errors]
    within = sum(size <= WITHIN for size in sizes) / len(sizes)
    return (
        f"{kind}: {len(sizes)} plans, median {statistics.median(sizes):.1%}, {within:.0%} within {WITHIN:.0%}, "
        f"worst {max(errors, key=abs):+.1%}"
    )


def print_drawn(plans: int, seed: int, folder: Path | None) -> None:
    """Print a row for each drawn plan, and a line for each ratio."""
    by_simulation, by_replay, off = list[float](), list[float](), list[float]()
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    drawn = filter(None, (draw(seed, number) for number in itertools.count(1)))
    for one in itertools.islice(drawn, plans):
        by_simulation.append(one.outcome.predicted_s / one.outcome.objective_s - 1)
        line = f"{one.number:>3}  {one.words:<56}{by_simulation[-1]:>+8.1%}"
        if folder:
            try:
                by_replay.append(replayed(one, folder))
                off.append((1 + by_replay[-1]) / (1 + by_simulation[-1]) - 1)
                line += f"{by_replay[-1]:>+8.1%}{off[-1]:>+8.1%}"
            except PipeplanError as error:
                line += f"  {error}"
        print(line, flush=True)
    print(summary("predicted over the formulas", by_simulation))
    if by_replay:
        print(summary("replayed over the formulas", by_replay))
        print(summary("replayed over predicted", off))


def main() -> None:
    """Print the table that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="nothing, bundled [MODEL …], or drawn")
    parser.add_argument("--plans", type=int, help="100 of each kind, or 60 drawn ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="also replay drawn plans; keep the results here")
    given = parser.parse_args()
    if given.what[:1] == ["bundled"]:
        print_bundled(given.what[1:] or list(MODELS))
    elif given.what == ["drawn"]:
        print_drawn(given.plans or 60, given.seed, given.replay)
    else:
        print_random(given.plans or 100)


if __name__ == "__main__":
    main()

"""Plans drawn by a seed, as they are predicted, simulated and, if asked for, replayed over shaped links.

    python tests/benchmarks/random_plans.py [--plans 60] [--seed 1] [--replay FOLDER] [--only NUMBER ...]

Model, cluster, schedule, minibatches per update and constraints are drawn; a plan is the answer of `pipeplan solve
--solver dp` within them. Constraints make plans that are rarely the best: few replicas, a fixed number of
stages, copies of the pipeline, slower links. The table has three ratios, less one: the step time of the answer over
that of the formulas, the replayed one over that of the formulas, and the replayed one over that of the answer, which is
above 0 where a plan is slower than its answer says. The first part takes some minutes. A replay takes about a minute;
its results are kept in FOLDER, where the command goes on. It needs
PYTHONPATH=tests/support:tests/evaluation.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeplan.api import cluster, read_profile
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.variants import with_faster_links
from pipeplan.errors import PipeplanError
from pipeplan.from_options.option_fields import options_for
from pipeplan.plan.schedules import ACCUMULATING, SCHEDULES
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem

MODELS = ("vgg16", "resnet50", "alexnet", "gnmt8", "gnmt16", "awd-lm", "s2vt")
WITHIN, MEDIAN_AIM = 0.10, 0.03


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
    model, name, schedule = rng.choice(MODELS), rng.choice("AB"), rng.choice(SCHEDULES)
    factor = rng.choice((1.0, 1.0, 0.5, 0.25))
    accumulate = rng.choice((8, 16, 32)) if schedule in ACCUMULATING else None
    constraints = rng.choice(
        ({}, {"stages": rng.randint(2, 5)}, {"max_replicas": rng.choice((2, 4, 8))}, {"max_stages": 2})
    )
    options = options_for("cuda", schedule=schedule, accumulate=accumulate, **constraints)
    problem = Problem(read_profile(f"{model}-v100"), _slower(cluster(name), factor), options)
    try:
        outcome = solve(problem, Settings(solver="dp", certify=False))
    except PipeplanError:
        return None
    return Drawn(number, model, name if factor == 1 else f"{name}/{1 / factor:.0f}", outcome)


def _slower(whole: Cluster, factor: float) -> Cluster:
    return whole if factor == 1 else with_faster_links(whole, len(whole.levels) - 1, factor)


def simulated(drawn: Drawn) -> float:
    """The step time of the answer over that of the formulas, less one."""
    return drawn.outcome.predicted_s / drawn.outcome.objective_s - 1


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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, metavar="FOLDER", help="also replay; keep the results here")
    parser.add_argument("--only", type=int, nargs="*", help="only the plans with these numbers")
    given = parser.parse_args()
    by_simulation, by_replay, off, number, count = [], [], [], 0, 0
    if given.replay:
        given.replay.mkdir(parents=True, exist_ok=True)
    while count < given.plans:
        number += 1
        drawn = draw(given.seed, number)
        count += drawn is not None
        if drawn is None or (given.only and number not in given.only):
            continue
        by_simulation.append(simulated(drawn))
        line = f"{number:>3}  {drawn.words:<56}{by_simulation[-1]:>+8.1%}"
        if given.replay:
            try:
                by_replay.append(replayed(drawn, given.replay))
                off.append((1 + by_replay[-1]) / (1 + by_simulation[-1]) - 1)
                line += f"{by_replay[-1]:>+8.1%}{off[-1]:>+8.1%}"
            except PipeplanError as error:
                line += f"  {error}"
        print(line, flush=True)
    print(summary("predicted over the formulas", by_simulation))
    if by_replay:
        print(summary("replayed over the formulas", by_replay))
        print(summary("replayed over predicted", off))


if __name__ == "__main__":
    main()

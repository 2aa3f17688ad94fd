"""How near predicted paces are to measured ones: five models, three plans of two and three workers each.

    python tests/benchmarks/prediction.py [--only MODEL] [--plan 2-1] [--repeats N] [--folder F] [--stages]

Each model is profiled once, as its users do, with times alone and under load, and with the costs of the executor.
Messages and all-reduces are measured with as many workers as the plan has (`pipeplan profile --links --workers`). A
plan has the shape that the table names and, of all places to cut the model, those that the planner takes for the
fastest; `uneven` ones give their first stage about three quarters of the computing. launch.sh then trains it, by 1F1B
with weight stashing. The pace is that of the last stage, without the minibatches while memory grows and the pipeline
fills, and without those while it drains. The error is predicted over measured minibatches a second, less one. All
plans are run in turn, several times, and the median of a plan's runs counts. What others used of the machine decides
whether something is measured again (`peers_load`).

--folder keeps profiles, clusters and run folders, and takes profiles and clusters that are there already. --stages
prints what each stage was to take and took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import peers_load
import torch
from peers_load import undisturbed
from peers_run import Here, pipeplan

from pipeplan.cluster_data import cluster_toml, local
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.machine_costs import as_charged, with_machine_costs
from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.verdict import Verdict
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_folder

HERE = Path(__file__).parent
MINIBATCHES, WARM, DRAIN = 80, 24, 6
"""Of a run; and of them those at its begin and its end that are not counted."""
UNEVEN = 0.75


@dataclass(frozen=True)
class Shape:
    """What a plan looks like."""

    replicas: tuple[int, ...]
    uneven: bool = False

    @property
    def name(self) -> str:
        """As the table has it."""
        return "-".join(map(str, self.replicas)) + (" uneven" if self.uneven else "")


@dataclass(frozen=True)
class Subject:
    """A model, by its file and function here, how many samples a minibatch has, and the plans."""

    ref: str
    minibatch: int
    shapes: tuple[Shape, ...]


EVEN, ODD, DATA, STRAIGHT = Shape((1, 1)), Shape((1, 1), uneven=True), Shape((2,)), Shape((1, 1, 1))
FIRST, LAST = Shape((2, 1)), Shape((1, 2))
SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {
        "vgg": Subject("peers_jobs.py:vgg", 4, (EVEN, FIRST, STRAIGHT)),
        "gpt": Subject("peers_jobs.py:gpt", 1, (EVEN, ODD, STRAIGHT)),
        "resnet": Subject("prediction_jobs.py:resnet", 4, (ODD, DATA, FIRST)),
        "lstm": Subject("prediction_jobs.py:lstm", 8, (EVEN, DATA, LAST)),
        "mlp": Subject("prediction_jobs.py:mlp", 64, (EVEN, LAST, STRAIGHT)),
    }
)


@dataclass
class Case:
    """One plan, and what its runs showed."""

    subject: str
    shape: Shape
    outcome: Outcome
    paces_s: list[float] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        """Seconds a minibatch, the median of the runs."""
        return statistics.median(self.paces_s)

    @property
    def error(self) -> float:
        """Predicted over measured minibatches a second, less one."""
        return self.measured_s / self.outcome.evaluation.pace_s - 1

    @property
    def folder(self) -> str:
        """Name of the plan's folder."""
        return f"{self.subject}-{self.shape.name.replace(' ', '-')}"

    def note(self, pace_s: float, summary: dict[str, Any]) -> None:
        """Keep what a run showed."""
        self.paces_s.append(pace_s)
        self.summaries.append(summary)


class Bench:
    """Where profiles, clusters and plans are kept."""

    def __init__(self, folder: Path, repeats: int) -> None:
        self._folder, self._repeats = folder, repeats

    @cache  # noqa: B019  there is one bench
    def cluster(self, workers: int) -> Cluster:
        """This machine, with measured links."""
        path = self._folder / f"links-{workers}.toml"
        if not path.exists():
            undisturbed(
                lambda: pipeplan("profile", "--links", "--workers", workers, "--budget", 10, "-o", path, "--force")
            )
        return with_machine_costs(cluster_toml.read_cluster(path))

    @cache  # noqa: B019
    def profile(self, name: str) -> Profile:
        """A model's layers, alone and under load."""
        path, subject = self._folder / f"{name}.json", SUBJECTS[name]
        if not path.exists():
            given = ("--microbatch", subject.minibatch, "--repeats", self._repeats, "-o", path)
            undisturbed(lambda: pipeplan("profile", HERE / subject.ref, *given))
        return Profile.load(path)

    def case(self, name: str, shape: Shape) -> Case:
        """A plan of a shape, and its prediction; on CPUs nothing hides behind anything."""
        workers = sum(shape.replicas)
        options = Options(overlap=0.0, recompute=False)
        profile = self.profile(name)  # first, as it measures the executor's costs
        problem = Problem(*as_charged(profile, self.cluster(workers), workers), options)
        plan, score = chosen(problem, shape)
        outcome = Outcome(problem, plan, score, (), Verdict(True, False, "of a given shape"), (), {})
        case = Case(name, shape, outcome)
        plan_folder.write_plan(outcome, self._folder / "plans" / case.folder, force=True)
        return case

    def run(self, case: Case, minibatches: int) -> tuple[float, dict[str, Any]]:
        """Train by launch.sh: seconds a minibatch, and the summary."""
        plan = self._folder / "plans" / case.folder
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            run = Path(folder) / "run"
            options = ("--epochs", "1", "--max-minibatches", str(minibatches), "--log-every", "0")
            Here().run(("bash", str(plan / "launch.sh"), *options, "--run-dir", str(run)))
            summary = json.loads((run / "summary.json").read_text())
            lines = [line for path in (run / "metrics").glob("rank-*.jsonl") for line in path.read_text().splitlines()]
        last = len(case.shape.replicas) - 1
        ends = sorted(line["time_s"] for line in map(json.loads, lines) if line["stage"] == last)
        return (ends[-1 - DRAIN] - ends[WARM - 1]) / (len(ends) - DRAIN - WARM), summary


def shaped(problem: Problem, shape: Shape) -> Iterator[Plan]:
    """All plans of a shape, cut between units in their order."""
    units, firsts = problem.units, [*itertools.accumulate(shape.replicas, initial=0)]
    for inner in itertools.combinations(range(1, len(units)), len(shape.replicas) - 1):
        cuts = (0, *inner, len(units))
        runs = zip(itertools.pairwise(cuts), itertools.pairwise(firsts), strict=True)
        yield Plan(
            tuple(
                Stage(tuple(name for unit in units[start:end] for name in unit.layers), tuple(range(*workers)), 1, 1)
                for (start, end), workers in runs
            )
        )


def chosen(problem: Problem, shape: Shape) -> tuple[Plan, Evaluation]:
    """The plan of a shape whose slowest stage is the fastest, as the planner would cut; of the uneven ones that nearest
    to its share."""

    def slowest(plan: Plan) -> float:
        return max(max(stage.stage_s, stage.boundary_s) for stage in evaluate(plan, problem).stages)

    def off(plan: Plan) -> float:
        first, second = (stage.compute_s for stage in evaluate(plan, problem).stages)
        return abs(first / (first + second) - UNEVEN)

    plan = min(shaped(problem, shape), key=off if shape.uneven else slowest)
    plan = depths.assign_depths(plan, problem, slowest(plan))
    return plan, evaluate(plan, problem)


def machine() -> str:
    """What this runs on, as far as the system tells."""
    here = local.local_processors()
    siblings = {
        path.read_text().strip()
        for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    }
    text = f"{here.cores} processors of {os.cpu_count()} ({here.name}), by its own word {len(siblings)} cores"
    return f"{text}; torch {torch.__version__}; one thread a worker"


def show(case: Case) -> None:
    """One row of the table."""
    score, runs = case.outcome.evaluation, case.paces_s
    spread = f"({1 / max(runs):.2f}-{1 / min(runs):.2f})"
    row = f"{case.subject:<7} {case.shape.name:<11} {score.rate:9.2f} {1 / case.measured_s:9.2f} {spread:<14}"
    print(f"{row} {case.error:+7.1%}  {score.bound}", flush=True)


def show_stages(case: Case) -> None:
    """What each stage of a plan was to take, and took."""
    for number, cost in enumerate(case.outcome.evaluation.stages):
        stages = [summary["stages"][number] for summary in case.summaries]
        predicted = {"forward": cost.forward_s, "backward": cost.backward_s - cost.update_s, "update": cost.update_s}
        parts = []
        for name in ("forward", "backward", "update", "sync", "send", "load", "wait"):
            key = f"{name}_s"
            found = [one["measured"].get(key, one.get(key, {}).get("measured")) for one in stages]
            before = f"{predicted[name] * 1e3:.1f} -> " if name in predicted else ""
            parts.append(f"{name} {before}{statistics.median(found) * 1e3:.1f}")
        print(f"        stage {number + 1}, ms: {', '.join(parts)}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SUBJECTS, action="append", help="only this model; may be repeated")
    parser.add_argument("--plan", help="only plans of this shape, such as 2-1")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each plan")
    parser.add_argument("--passes", type=int, default=12, help="passes of each profile")
    parser.add_argument("--minibatches", type=int, default=MINIBATCHES)
    parser.add_argument("--attempts", type=int, default=peers_load.ATTEMPTS, help="at what others disturb")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--stages", action="store_true", help="what each stage took")
    given = parser.parse_args()
    peers_load.ATTEMPTS = given.attempts
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, given.passes)
        cases = [
            bench.case(name, shape)
            for name in given.only or SUBJECTS
            for shape in SUBJECTS[name].shapes
            if given.plan in (None, shape.name)
        ]
        for _ in range(given.repeats):
            for case in cases:
                case.note(*undisturbed(partial(bench.run, case, given.minibatches)))
    print(f"{'model':<7} {'plan':<11} {'predicted':>9} {'measured':>9} {'':<14} {'error':>7}  bound by", flush=True)
    for case in cases:
        show(case)
        if given.stages:
            show_stages(case)
    errors = sorted(abs(case.error) for case in cases)
    print(f"error: median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, of {len(errors)} plans")


if __name__ == "__main__":
    main()

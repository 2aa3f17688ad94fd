"""The input of a report: a plan, its scenario, and, if the profile is available, the problem that the plan solves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan.checker.verify import CheckedPlan, check_readable_plan
from pipeplan.cluster_data import cluster_json
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.flush import BatchTime
from pipeplan.drawing.answer import plan_name
from pipeplan.plan.plan import Plan
from pipeplan.problem import plan_file
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation import scenario
from pipeplan.simulation.scenario import PredictedStage, Scenario
from pipeplan.util.files import Node
from pipeplan.util.text import one_line
from pipeplan.util.typed import decode


@dataclass(frozen=True)
class ProfiledProblem:
    """The problem and the score of a plan, which are known only with the profile."""

    problem: Problem
    score: Evaluation

    @property
    def profile(self) -> Profile:
        """The profile of the problem."""
        return self.problem.profile


@dataclass(frozen=True)
class ReportSource:
    """A plan as read from plan.json."""

    root: Node
    plan: Plan
    cluster: Cluster
    scenario: Scenario
    known: ProfiledProblem | None
    """None if the profile is not available."""
    checked: CheckedPlan | None = None
    """The findings of `pipeplan check`; None if the profile is not available."""

    @property
    def pace_s(self) -> float:
        """Seconds per minibatch by the formulas."""
        return self.scenario.predicted_s

    @property
    def step_s(self) -> float:
        """Seconds per minibatch as plan.json states them: simulated where that differs from the formulas."""
        return plan_file.step_time_s(self.root)

    @property
    def microbatch(self) -> int:
        """Samples of a microbatch."""
        return self.root["profile"]["minibatch"].integer(minimum=1)

    @property
    def name(self) -> str:
        """The plan in the words of RUN: `8-1, 1f1b-flush`, `HSDP on 32 workers`."""
        stated = self.root["options"].get("sharding")
        sharding = Sharding.NONE if stated is None else decode(stated, Sharding)
        return plan_name(self.plan, sharding, self.microbatch)

    @property
    def batch(self) -> BatchTime | None:
        """The parts of the time from one update to the next; None for a schedule without a flush."""
        stated = self.root["prediction"].get("batch")
        return None if stated is None else decode(stated, BatchTime)

    @property
    def bound(self) -> str:
        """The resource or part of a batch that limits the step time."""
        return one_line(self.root["prediction"]["bound_by"].text())

    @cached_property
    def predictions(self) -> tuple[PredictedStage, ...]:
        """The predictions of plan.json for every stage."""
        return scenario.predicted_stages(self.root)

    def capacity_bytes(self, workers: Sequence[int]) -> int | None:
        """The smallest memory of these workers; None if memory does not limit the plan."""
        return self.cluster.memory_of(workers) if self.root["options"]["memory"].boolean() else None


def read_report_source(root: Node, profile: Profile | None) -> ReportSource:
    """Read the source of a report from a plan.json and, if there is one, its profile.

    Raises `InputError` if either is damaged.
    """
    simulated = scenario.scenario_from_document(root)
    if simulated.predicted_s <= 0:
        root["prediction"]["minibatch_s"].fail("expected more than 0 seconds: solve again with --force")
    if plan_file.step_time_s(root) <= 0:
        root["stated"]["minibatch_s"].fail("expected more than 0 seconds: solve again with --force")
    known = checked = None
    if profile is not None:
        checked = check_readable_plan(root, profile)
        problem, plan = plan_file.plan_from_document(root, profile)
        known = ProfiledProblem(problem, evaluate(plan, problem))
        if not math.isfinite(known.score.pace_s):
            root["plan"].fail("its depths allow no steady state: solve again with --force")
    return ReportSource(
        root, Plan.from_json(root["plan"]), cluster_json.cluster_from_json(root["cluster"]), simulated, known, checked
    )

"""The input of a report: a plan, its scenario, and the problem that it solves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.checker.verify import CheckedPlan, check_readable_plan
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.drawing.answer import plan_name
from pipeplan.plan.plan import Plan
from pipeplan.problem.plan_file import PlanFile
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation import scenario
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.files import Node
from pipeplan.util.text import one_line


@dataclass(frozen=True)
class ReportSource:
    """A plan as read from plan.json, the problem that it solves, and what `pipeplan check` finds."""

    root: Node
    stated: PlanFile
    problem: Problem
    scenario: Scenario
    score: Evaluation
    checked: CheckedPlan

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.stated.plan

    @property
    def step_time_s(self) -> float:
        """Seconds per minibatch by the formulas."""
        return self.scenario.predicted_s

    @property
    def microbatch(self) -> int:
        """Number of samples of a microbatch."""
        return self.stated.profile.minibatch

    @property
    def name(self) -> str:
        """The plan in a few words, such as `8-1, 1f1b-flush` or `HSDP on 32 workers`."""
        return plan_name(self.stated.plan, self.stated.options.sharding, self.microbatch)

    @property
    def bound(self) -> str:
        """The resource or part of a batch that limits the step time."""
        return one_line(self.stated.prediction.bound_by)

    def capacity_bytes(self, workers: Sequence[int]) -> int | None:
        """The smallest device memory of these workers, in bytes; None if memory does not limit the plan."""
        return self.problem.cluster.memory_of(workers) if self.stated.options.memory else None


def read_report_source(root: Node, profile: Profile) -> ReportSource:
    """Read the source of a report from a plan.json and its profile. Raises `InputError` if either is damaged."""
    stated, simulated = PlanFile.of(root), scenario.scenario_from_document(root)
    checked, problem = check_readable_plan(root, profile), stated.to_problem(profile)
    score = evaluate(stated.plan, problem)
    if not math.isfinite(score.step_time_s):
        root["plan"].fail("its depths allow no steady state: solve again with --force")
    return ReportSource(root, stated, problem, simulated, score, checked)

"""What a report is made of: a plan, its scenario, and, where its profile is at hand, the problem that it solves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.cluster_data import cluster_json
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.plan.plan import Plan
from pipeplan.problem import plan_file
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation import scenario
from pipeplan.simulation.scenario import Scenario
from pipeplan.util.files import Node


@dataclass(frozen=True)
class Known:
    """What only the profile tells."""

    problem: Problem
    score: Evaluation

    @property
    def profile(self) -> Profile:
        """The profile itself."""
        return self.problem.profile


@dataclass(frozen=True)
class Source:
    """A plan as plan.json has it."""

    root: Node
    plan: Plan
    cluster: Cluster
    scenario: Scenario
    known: Known | None
    """None where the profile is not at hand."""

    @property
    def pace_s(self) -> float:
        """Seconds per minibatch, as predicted."""
        return self.scenario.predicted_s

    @property
    def predictions(self) -> list[Node]:
        """What plan.json predicts of every stage."""
        return self.root["prediction"]["stages"].items()

    def capacity_bytes(self, workers: Sequence[int]) -> int | None:
        """What each of these workers has at least; None where memory does not limit the plan."""
        return self.cluster.memory_of(workers) if self.root["options"]["memory"].boolean() else None


def read(root: Node, profile: Profile | None) -> Source:
    """The source that a plan.json is, with its profile if that is at hand. Raises `InputError` where it is damaged."""
    found = scenario.scenario_from_document(root)
    if found.predicted_s <= 0:
        root["prediction"]["minibatch_s"].fail("expected more than 0 seconds: solve again with --force")
    known = None
    if profile is not None:
        problem, plan = plan_file.plan_from_document(root, profile)
        known = Known(problem, evaluate(plan, problem))
        if not math.isfinite(known.score.pace_s):
            root["plan"].fail("its depths keep no pace at all: solve again with --force")
    return Source(root, Plan.from_json(root["plan"]), cluster_json.cluster_from_json(root["cluster"]), found, known)

"""plan.json: its schema, and the reader that the whole planner uses.

The checker has its own schema (`checker/document.py`). The schema here lacks certificates and verdicts, because the
planner computes nothing with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.cluster_document import ClusterFields
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem.options import Options
from pipeplan.problem.plan_profile import PlanProfile, profile_of_plan
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node, read_document, read_text
from pipeplan.util.typed import Amount, Bytes, Positive, decode

PLAN_FORMAT, PLAN_VERSION = "pipeplan-plan", 1
StepTime = Annotated[float, Meta(gt=0, le=2**63)]
"""A step time in seconds per minibatch."""


@dataclass(frozen=True, kw_only=True)
class PredictedStage:
    """The figures of one stage for one minibatch on one replica, in seconds and bytes."""

    forward_s: Amount
    backward_s: Amount
    """Backward pass without the optimiser's step."""
    update_s: Amount = 0.0
    """The share of the optimiser's step that is charged to one minibatch."""
    weights_s: Amount = 0.0
    """The part of `backward_s` for gradients of the weights, if these have a separate pass; else 0."""
    split_s: Amount = 0.0
    """The time that the separate pass adds to the backward pass."""
    executor_s: Amount = 0.0
    """The executor's own work. In training, `forward_s` and `backward_s` each include half of this time; in inference,
    `forward_s` includes all of it."""
    sync_s: Amount
    """Time of one all-reduce of a group of minibatches among all replicas."""
    exposed_sync_s: Amount | None = None
    """The part of `sync_s` that remains after the backward pass that overlaps with the all-reduce, in plain data
    parallelism and under a flush. None if the all-reduce starts after the pass."""
    receive_bytes: Bytes = 0
    """Bytes of activations that a minibatch brings from the previous stage."""
    send_bytes: Bytes
    """Bytes of activations that a minibatch sends to the next stage."""
    send_gradient_bytes: Bytes = 0
    """Bytes of gradients that go back to the previous stage."""
    receive_gradient_bytes: Bytes
    """Bytes of gradients that come back from the next stage."""
    parameter_bytes: Bytes
    minibatch_bytes: Bytes
    memory_bytes: Bytes


@dataclass(frozen=True)
class BatchTime:
    """The parts of the time from one update to the next, in seconds. The parts add up to this time."""

    minibatches: Positive
    """Minibatches of one update, in one copy of the pipeline."""
    work_s: Amount
    """Time of the first minibatch's passes on the path from the stage whose all-reduce the others wait for to the
    slowest resource."""
    transfers_s: Amount
    """Time of the first minibatch's transfers on the same path."""
    steady_s: Amount
    """Time that the other minibatches add at the slowest resource."""
    exposed_s: Amount
    """Time from the last backward pass before an update to the next forward pass: the exposed all-reduce, the exchange
    of the gradients of shared weights, and the optimiser's step."""
    bound: str
    """The slowest resource, as text for messages."""
    order_s: float = 0.0
    """Waiting time that the order of the passes causes if workers run several stages."""

    @property
    def total_s(self) -> float:
        """Seconds from one update to the next."""
        return self.work_s + self.transfers_s + self.steady_s + self.exposed_s + self.order_s

    def cause(self, stages: int) -> str:
        """The part that takes longest, as text.

        In a plan of one stage all passes count as compute, because there is no pipeline to fill.
        """
        first_s, steady_s = self.work_s + self.transfers_s, self.steady_s
        parts = (
            (steady_s + (first_s if stages == 1 else 0.0), self.bound),
            (first_s if stages > 1 else 0.0, "filling and draining the pipeline"),
            (self.exposed_s, "gradient synchronisation"),
            (self.order_s, "waiting for other stages between passes"),
        )
        return max(parts, key=lambda part: part[0])[1]


class PlanPrediction(Struct, frozen=True):
    """The field `prediction`: the cost that the formulas give."""

    minibatch_s: StepTime
    bound_by: str
    """The resource or part of a batch that limits the step time."""
    copies_synchronisation_s: Amount
    stages: tuple[PredictedStage, ...]
    batch: BatchTime | None = None


class StatedTime(Struct, frozen=True):
    """The field `stated`: the step time that the answer shows."""

    minibatch_s: StepTime


class PlanBaseline(Struct, frozen=True):
    """A baseline of a plan for a named schedule."""

    name: str
    config: str
    remark: str
    not_taken: str = ""
    minibatch_s: Amount | None = None
    step_s: Amount | None = None
    gain: Amount | None = None

    @property
    def step_time_s(self) -> float | None:
        """Step time of the baseline, in seconds per minibatch. Older plans have only the step time of the formulas."""
        return self.minibatch_s if self.step_s is None else self.step_s


class PlanUpdates(Struct, frozen=True):
    """Age of the gradients of a rival, by stage, in updates."""

    stale_by: tuple[int, ...] = ()


class PlanRival(Struct, frozen=True):
    """A plan of another kind that the answer compares with the plan, at the same global batch."""

    kind: str
    config: str
    schedule: str
    minibatch: int
    workers: int
    samples_per_s: Amount
    data_parallel: str = ""
    allowed: bool = True
    updates: PlanUpdates = PlanUpdates()


class PlanChoice(Struct, frozen=True):
    """The field `choice`: the rivals among which the plan was chosen."""

    rivals: tuple[PlanRival, ...]
    stale: PlanRival | None = None
    """The best plan whose gradients are computed with older weights."""
    rounded: PlanRival | None = None
    """DDP with gradients in bfloat16."""


class PlanFile(Struct, frozen=True, kw_only=True):
    """The parts of a plan.json that are needed for a problem, a plan, a simulation, launchers and a report."""

    format: Literal["pipeplan-plan"] = "pipeplan-plan"
    version: Literal[1] = 1
    pipeplan: str = ""
    """The version of pipeplan that wrote the file."""
    profile: PlanProfile
    cluster: ClusterFields
    options: Options
    plan: Plan
    data_parallel: Literal["", "ddp", "zero1", "fsdp", "hsdp"] = ""
    prediction: PlanPrediction
    stated: StatedTime | None = None
    choice: PlanChoice | None = None
    baselines: tuple[PlanBaseline, ...] = ()
    gap: Amount | None = None

    @property
    def step_s(self) -> float:
        """The step time that the answer shows, in seconds per minibatch.

        Older files have only the step time of the formulas.
        """
        return (self.stated or self.prediction).minibatch_s

    def to_cluster(self) -> Cluster:
        """The cluster that the plan was made for."""
        return self.cluster.to_cluster()

    def to_problem(self, profile: Profile) -> Problem:
        """The problem that the plan solves, given its profile, with the plan's schedule."""
        plan = self.plan
        options = replace(self.options, inference=plan.inference, schedule=plan.schedule, accumulate=plan.accumulate)
        return Problem(profile, self.to_cluster(), options)

    @staticmethod
    def of(root: Node) -> PlanFile:
        """Read a plan.json. Raises an `InputError` that names the wrong field."""
        if root["options"].mapping().get("shard_optimizer") is True:  # plans before FSDP
            root = Node(root.mapping() | {"options": root["options"].mapping() | {"sharding": "zero1"}}, root.where)
        with root.locating_errors():
            stated = decode(root, PlanFile)
        count, found = len(stated.plan.stages), len(stated.prediction.stages)
        if count not in (0, found):
            root["prediction"]["stages"].fail(f"expected {count}, one for each stage, found {found}")
        return stated


def is_plan(path: Path) -> bool:
    """Whether a path is a plan: a JSON file with the `format` of a plan, or any folder."""
    if path.is_dir():
        return True
    try:
        document = json.loads(read_text(path))
    except (InputError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == PLAN_FORMAT


def read_plan_document(path: Path) -> Node:
    """The content of a plan.json, given the path of the file or its folder. Raises an `InputError` if there is none."""
    if not plan_file(path).is_file():
        raise InputError(f"{path} has no plan.json; `pipeplan solve` writes plan folders")
    return read_document(plan_file(path), PLAN_FORMAT, PLAN_VERSION)


def plan_file(path: Path) -> Path:
    """The path of the plan.json in a plan folder, or `path` itself if it is not a folder."""
    return path / "plan.json" if path.is_dir() else path


def read_plan(path: Path, profile_path: Path | None = None) -> tuple[Problem, Plan]:
    """The problem and the plan in a plan folder or plan.json, with the profile that it was made from.

    The profile is scaled to the minibatch size of the plan. Without `profile_path`, the profile is searched for by its
    digest. Raises an `InputError` if the profile has another digest or is not found, or if a file cannot be read.
    """
    root = read_plan_document(path)
    return plan_from_document(root, profile_of_plan(root, plan_file(path), profile_path))


def plan_from_document(root: Node, profile: Profile) -> tuple[Problem, Plan]:
    """The problem and the plan of a plan.json, given the profile that it was made from."""
    stated = PlanFile.of(root)
    return stated.to_problem(profile), stated.plan

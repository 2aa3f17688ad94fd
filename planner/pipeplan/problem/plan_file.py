"""plan.json: its schema, and the reader by which all of the planner reads it.

The checker has a schema of its own (`checker/document.py`). What nobody in the planner computes with, as certificates
and verdicts, is not part of this one.
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
    """Without the optimiser's step."""
    update_s: Amount = 0.0
    """The share of the optimiser's step that is charged to one minibatch."""
    weights_s: Amount = 0.0
    """The part of `backward_s` that gradients of the weights take in a pass of their own."""
    split_s: Amount = 0.0
    """What it adds to the backward pass to compute the gradients of weights apart."""
    executor_s: Amount = 0.0
    """The executor's own work: half of it in the forward pass, half in the backward pass, or all in the only pass."""
    sync_s: Amount
    """Time of one all-reduce of a group of minibatches among all replicas."""
    exposed_sync_s: Amount | None = None
    """The part of `sync_s` that is left when the backward pass ends during which the all-reduce starts, in plain data
    parallelism and under a flush; None where it starts after the pass."""
    receive_bytes: Bytes = 0
    """Activations that a minibatch brings from the previous stage."""
    send_bytes: Bytes
    """Activations that a minibatch sends to the next stage."""
    send_gradient_bytes: Bytes = 0
    """Gradients that go back to the previous stage."""
    receive_gradient_bytes: Bytes
    """Gradients that come back from the next stage."""
    parameter_bytes: Bytes
    minibatch_bytes: Bytes
    memory_bytes: Bytes


@dataclass(frozen=True)
class BatchTime:
    """The parts of the time from one update to the next, in seconds. Their sum is the time."""

    minibatches: Positive
    """Minibatches of one update, in one copy of the pipeline."""
    work_s: Amount
    """The first minibatch's passes, from the stage whose all-reduce is waited for to the slowest resource."""
    transfers_s: Amount
    """The first minibatch's transfers between these stages."""
    steady_s: Amount
    """Time that the other minibatches add at the slowest resource."""
    exposed_s: Amount
    """Time of an update from the last backward pass to the next forward pass: the exposed all-reduce, the exchange of
    the gradients of shared weights, and the optimiser's step."""
    bound: str
    """The slowest resource, for messages."""
    order_s: float = 0.0
    """Waiting that the order of the passes causes, where workers run several stages."""

    @property
    def total_s(self) -> float:
        """Seconds from one update to the next."""
        return self.work_s + self.transfers_s + self.steady_s + self.exposed_s + self.order_s

    def cause(self, stages: int) -> str:
        """The part that takes longest. A plan of one stage has no pipeline to fill: its passes are all compute."""
        first_s, steady_s = self.work_s + self.transfers_s, self.steady_s
        parts = (
            (steady_s + (first_s if stages == 1 else 0.0), self.bound),
            (first_s if stages > 1 else 0.0, "filling and draining the pipeline"),
            (self.exposed_s, "gradient synchronisation"),
            (self.order_s, "waiting for other stages between passes"),
        )
        return max(parts, key=lambda part: part[0])[1]


class PlanPrediction(Struct, frozen=True):
    """The field `prediction`: the cost by the formulas."""

    minibatch_s: StepTime
    bound_by: str
    """The cause: the resource or part of a batch that limits the step time."""
    copies_synchronisation_s: Amount
    stages: tuple[PredictedStage, ...]
    batch: BatchTime | None = None


class StatedTime(Struct, frozen=True):
    """The field `stated`: the step time that the answer states."""

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
        """Its step time, in seconds per minibatch; in older plans that of the formulas."""
        return self.minibatch_s if self.step_s is None else self.step_s


class PlanUpdates(Struct, frozen=True):
    """How old the gradients of a rival are, by stage, in updates."""

    stale_by: tuple[int, ...] = ()


class PlanRival(Struct, frozen=True):
    """A rival of the plan, at the same global batch."""

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
    """The best plan with old gradients."""


class PlanFile(Struct, frozen=True, kw_only=True):
    """The parts of a plan.json from which a problem, a plan, a simulation, launchers and a report are made."""

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
        """The step time that the answer states, in seconds per minibatch; in older files that of the formulas."""
        return (self.stated or self.prediction).minibatch_s

    def to_cluster(self) -> Cluster:
        """The cluster that the plan was made for."""
        return self.cluster.to_cluster()

    def to_problem(self, profile: Profile) -> Problem:
        """The problem that the plan solves, given its profile. The plan states its schedule by itself."""
        plan = self.plan
        options = replace(self.options, inference=plan.inference, schedule=plan.schedule, accumulate=plan.accumulate)
        return Problem(profile, self.to_cluster(), options)

    @staticmethod
    def of(root: Node) -> PlanFile:
        """Read a plan.json. Raises an `InputError` that names the field that is wrong."""
        if root["options"].mapping().get("shard_optimizer") is True:  # plans before FSDP
            root = Node(root.mapping() | {"options": root["options"].mapping() | {"sharding": "zero1"}}, root.where)
        with root.locating_errors():
            stated = decode(root, PlanFile)
        count, found = len(stated.plan.stages), len(stated.prediction.stages)
        if count not in (0, found):
            root["prediction"]["stages"].fail(f"expected {count}, one for each stage, found {found}")
        return stated


def is_plan(path: Path) -> bool:
    """Whether a path is a folder, which is taken for a plan folder, or a JSON file whose `format` is that of a plan."""
    if path.is_dir():
        return True
    try:
        document = json.loads(read_text(path))
    except (InputError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == PLAN_FORMAT


def read_plan_document(path: Path) -> Node:
    """The content of a plan folder's plan.json, or of that file. Raises an `InputError` where there is none."""
    if not plan_file(path).is_file():
        raise InputError(f"{path} has no plan.json; `pipeplan solve` writes plan folders")
    return read_document(plan_file(path), PLAN_FORMAT, PLAN_VERSION)


def plan_file(path: Path) -> Path:
    """The path of the plan.json in a plan folder, or `path` itself where it is no folder."""
    return path / "plan.json" if path.is_dir() else path


def read_plan(path: Path, profile_path: Path | None = None) -> tuple[Problem, Plan]:
    """The problem and the plan in a plan folder or plan.json, with the profile that it was made from.

    The profile is taken at the minibatch size of the plan. Without `profile_path` it is searched for by its digest.
    Raises an `InputError` where it is another profile or is not found, or where a file cannot be read.
    """
    root = read_plan_document(path)
    return plan_from_document(root, profile_of_plan(root, plan_file(path), profile_path))


def plan_from_document(root: Node, profile: Profile) -> tuple[Problem, Plan]:
    """The problem and the plan of a plan.json, given the profile that it was made from."""
    stated = PlanFile.of(root)
    return stated.to_problem(profile), stated.plan

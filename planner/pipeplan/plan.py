"""A plan: which layers each stage holds, on which workers, with how many minibatches in flight. Pure data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from pipeplan import cost
from pipeplan.files import Node

STASHING, VERTICAL, DOUBLE_BUFFERED, GPIPE, FLUSH = "1f1b-stashing", "vertical-sync", "2bw", "gpipe", "1f1b-flush"
SCHEDULES = (STASHING, VERTICAL, DOUBLE_BUFFERED, GPIPE, FLUSH)
"""Of training, by the names that the executor knows them by."""
FLUSHING = (GPIPE, FLUSH)
"""Synchronous: the pipeline drains before every update."""
ACCUMULATING = (DOUBLE_BUFFERED, *FLUSHING)
"""One update for a number of minibatches that is common to all stages."""
INFERENCE = "forward-only"


@dataclass(frozen=True)
class Stage:
    """One stage. Minibatch i is computed, forward and backward, by `workers[i mod len(workers)]`."""

    layers: tuple[str, ...]
    workers: tuple[int, ...]
    depth: int
    """Minibatches that each replica holds in flight."""
    versions: int
    """Versions of the weights that each replica keeps, as `Plan.versions` says."""
    recompute: bool = False
    """Whether it keeps only its input for backward, and runs forward again there."""

    @property
    def replicas(self) -> int:
        """How many workers hold this stage."""
        return len(self.workers)


@dataclass(frozen=True)
class Plan:
    """Stages from input to output.

    With `copies` m > 1 the plan is a whole pipeline inside each of m components of the cluster: minibatch i belongs to
    copy i mod m, whose replicas of a stage are every m-th of the stage's workers.
    """

    stages: tuple[Stage, ...]
    copies: int = 1
    inference: bool = False
    schedule: str = STASHING
    """Of training; see `SCHEDULES`."""
    accumulate: int | None = None
    """Minibatches per update, for the schedules in `ACCUMULATING`."""

    @property
    def config(self) -> str:
        """Replica counts from input to output, `15-1`; a pipeline in each of 4 components reads `4×(1-1)`."""
        counts = "-".join(str(stage.replicas // self.copies) for stage in self.stages)
        return counts if self.copies == 1 else f"{self.copies}×({counts})"

    def lag(self, index: int) -> int:
        """By how many updates a stage runs late (`cost.update_lag`): none where all stages have an update in common."""
        if self.schedule in ACCUMULATING:
            return 0
        return int(cost.update_lag(self.stages[index].replicas, len(self.stages) == 1))

    def versions(self, index: int) -> int:
        """Versions of the weights that each replica of a stage keeps. docs/cost-model.md has the table."""
        if self.inference or self.schedule in FLUSHING:
            return 1
        if self.schedule == DOUBLE_BUFFERED:
            return 2
        stage, first = self.stages[index], self.stages[0]
        if self.schedule == VERTICAL:
            return int(cost.vertical_versions(first.depth + self.lag(0), first.replicas, stage.replicas))
        # One for each minibatch in flight, one more for a late update.
        return stage.depth + self.lag(index)

    @property
    def busy(self) -> int:
        """Workers that have something to do."""
        return sum(stage.replicas for stage in self.stages)

    def copy(self, index: int) -> tuple[tuple[int, ...], ...]:
        """The workers of every stage in one copy of the pipeline."""
        return tuple(stage.workers[index :: self.copies] for stage in self.stages)

    def digest(self, profile: str, cluster: str) -> str:
        """A hash of the plan and of the digests of its profile and cluster, by which a run names the plan that ran."""
        identity = json.dumps([self.to_json(), profile, cluster], sort_keys=True)
        return "sha256:" + hashlib.sha256(identity.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The fields that plan.json holds under `plan`."""
        return {
            "inference": self.inference,
            "copies": self.copies,
            "schedule": INFERENCE if self.inference else self.schedule,
            "accumulate": self.accumulate,
            "stages": [
                {
                    "layers": list(stage.layers),
                    "workers": list(stage.workers),
                    "depth": stage.depth,
                    "versions": stage.versions,
                    "recompute": stage.recompute,
                }
                for stage in self.stages
            ],
        }

    @staticmethod
    def from_json(node: Node) -> Plan:
        """The plan that `to_json` wrote."""
        inference = node["inference"].boolean()
        schedule = node["schedule"].text()
        if schedule not in ((INFERENCE,) if inference else SCHEDULES):
            node["schedule"].fail(f"there is no such schedule for {'inference' if inference else 'training'}")
        accumulate = node.get("accumulate")
        return Plan(
            stages=tuple(
                Stage(
                    layers=tuple(name.text() for name in stage["layers"].items()),
                    workers=tuple(worker.integer() for worker in stage["workers"].items()),
                    depth=stage["depth"].integer(minimum=1),
                    versions=stage["versions"].integer(minimum=1),
                    recompute=stage["recompute"].boolean(),
                )
                for stage in node["stages"].items()
            ),
            copies=node["copies"].integer(minimum=1),
            inference=inference,
            schedule=STASHING if inference else schedule,
            accumulate=accumulate.integer(minimum=1) if accumulate else None,
        )


def data_parallel(
    layers: tuple[str, ...], workers: int, *, inference: bool, schedule: str = STASHING, accumulate: int | None = None
) -> Plan:
    """The whole model on every one of the first so many workers. `schedule` is of training."""
    schedule = STASHING if inference else schedule
    accumulate = accumulate if schedule in ACCUMULATING else None
    depth = int(cost.rounds(accumulate or 1, workers)) if schedule == GPIPE else 1
    stage = Stage(layers, tuple(range(workers)), depth, 1)
    plan = Plan((stage,), inference=inference, schedule=schedule, accumulate=accumulate)
    return replace(plan, stages=(replace(stage, versions=plan.versions(0)),))

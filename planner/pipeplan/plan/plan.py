"""A plan as pure data: the layers of each stage, its workers, and its number of minibatches in flight."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from pipeplan.errors import InputError
from pipeplan.plan.schedules import (
    ACCUMULATING,
    GPIPE,
    INFERENCE,
    SCHEDULES,
    SPLITTING,
    STASHING,
    TRAITS,
    VERTICAL,
    VIRTUAL,
    update_lag,
    vertical_versions,
)
from pipeplan.util.files import Node
from pipeplan.util.typed import Natural, Positive, decode


@dataclass(frozen=True)
class Stage:
    """One stage. Minibatch i is computed, forward and backward, by `workers[i mod len(workers)]`."""

    layers: tuple[str, ...]
    """Names of the layers."""
    workers: tuple[Natural, ...]
    """Indices of the workers, one for each replica."""
    depth: Positive
    """Largest number of minibatches that each replica has in flight at once."""
    versions: Positive
    """Versions of the weights that each replica keeps; equals `Plan.versions` of this stage."""
    recompute: bool = False
    """Whether the stage keeps only its input, and runs forward again before the backward pass."""
    deferred: Natural = 0
    """Largest number of minibatches whose gradients of the weights are deferred; 0 under schedules without action W."""
    shares: tuple[Positive, ...] = ()
    """Minibatches of an update on each worker, in data parallelism on workers of unequal speed. Each worker then has
    consecutive minibatches. Empty if the workers take minibatches in turn."""

    @property
    def replicas(self) -> int:
        """Number of workers that hold this stage, in all copies of the pipeline together."""
        return len(self.workers)


@dataclass(frozen=True)
class Plan:
    """The stages of a pipeline, from input to output.

    With m > 1 `copies` of the pipeline, each of m components of the cluster holds a whole pipeline. Minibatch i goes to
    copy i mod m, and every m-th worker of a stage belongs to the same copy.
    """

    stages: tuple[Stage, ...]
    copies: Positive = 1
    inference: bool = False
    schedule: str = STASHING
    """Schedule of training, one of `SCHEDULES`; unused in inference, whose files say `forward-only`."""
    accumulate: Positive | None = None
    """Minibatches per update, for the schedules in `ACCUMULATING`."""

    def __post_init__(self) -> None:
        if self.inference and self.schedule == INFERENCE:
            object.__setattr__(self, "schedule", STASHING)
        if self.schedule not in SCHEDULES:
            what = "inference" if self.inference else "training"
            raise InputError(f"plan: schedule: there is no such schedule for {what}: {self.schedule!r}")

    @property
    def config(self) -> str:
        """Replica counts from input to output, such as `15-1`; four copies of a straight pipeline read `4×(1-1)`.

        Data parallelism with unequal shares is written as its shares, such as `5:3`.
        """
        if self.stages[0].shares:
            return ":".join(map(str, self.stages[0].shares))
        if self.virtual:
            counts = "-".join(str(len(workers)) for workers in self.devices)
            return f"{counts} × {len(self.stages) // len(self.devices)} stages"
        counts = "-".join(str(stage.replicas // self.copies) for stage in self.stages)
        return counts if self.copies == 1 else f"{self.copies}×({counts})"

    @property
    def virtual(self) -> bool:
        """Whether each worker runs several stages."""
        return not self.inference and self.schedule in VIRTUAL

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each position of the pipeline. A position runs one stage, or several virtual stages."""
        return tuple(dict.fromkeys(stage.workers for stage in self.stages))

    def device_of(self, index: int) -> int | None:
        """The position of a stage's workers in the pipeline if they run several stages; else None."""
        return self.devices.index(self.stages[index].workers) if self.virtual else None

    def lag(self, index: int) -> int:
        """Update lag of a stage (`schedules.update_lag`); 0 under schedules in which all stages update together."""
        if self.schedule in ACCUMULATING:
            return 0
        return int(update_lag(self.stages[index].replicas, len(self.stages) == 1))

    def versions(self, index: int) -> int:
        """Number of weight versions that each replica of a stage keeps (docs/cost-model.md has the table)."""
        if self.inference:
            return 1
        stage, first = self.stages[index], self.stages[0]
        if self.schedule == VERTICAL:
            return int(vertical_versions(first.depth + self.lag(0), first.replicas, stage.replicas))
        if versions := TRAITS[self.schedule].versions:
            return versions
        # One version for each minibatch in flight, and one more if the update lags.
        return stage.depth + self.lag(index)

    @property
    def busy(self) -> int:
        """Number of workers that hold a stage."""
        return len({worker for stage in self.stages for worker in stage.workers})

    def copy(self, index: int) -> tuple[tuple[int, ...], ...]:
        """The workers of every stage in copy `index` of the pipeline."""
        return tuple(stage.workers[index :: self.copies] for stage in self.stages)

    def digest(self, profile: str, cluster: str) -> str:
        """A SHA-256 hash of the plan and the digests of its profile and cluster.

        A run identifies its plan by this hash.
        """
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
                    **({"deferred": stage.deferred} if self.schedule in SPLITTING else {}),
                    **({"shares": list(stage.shares)} if stage.shares else {}),
                }
                for stage in self.stages
            ],
        }

    @staticmethod
    def from_json(node: Node) -> Plan:
        """The plan that `to_json` wrote. Raises an `InputError` that names the field that is wrong."""
        with node.locating_errors():
            return decode(node, Plan)


def data_parallel(
    layers: tuple[str, ...], workers: int, *, inference: bool, schedule: str = STASHING, accumulate: int | None = None
) -> Plan:
    """Plain data parallelism: the whole model on each of the first `workers` workers.

    `schedule` and `accumulate` are those of training; inference ignores them.
    """
    schedule = STASHING if inference else schedule
    accumulate = accumulate if schedule in ACCUMULATING else None
    # Under GPipe all minibatches of an update on a worker are in flight.
    depth = -(-(accumulate or 1) // workers) if schedule == GPIPE else 1
    stage = Stage(layers, tuple(range(workers)), depth, 1)
    plan = Plan((stage,), inference=inference, schedule=schedule, accumulate=accumulate)
    return replace(plan, stages=(replace(stage, versions=plan.versions(0)),))

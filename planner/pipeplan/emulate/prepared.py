"""A plan prepared for its replay: the scaling, the number of minibatches, and the order for the emulation."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.cluster_json import from_json
from pipeplan.emulate import measured
from pipeplan.emulate.folder import write_folder
from pipeplan.emulate.rings import Rings
from pipeplan.emulate.scaling import Scaling, scaling_for
from pipeplan.emulate.servers import Part, network, parts_of
from pipeplan.errors import InputError
from pipeplan.files import Node, read_document
from pipeplan.plan import Plan
from pipeplan.profile_data import Profile
from pipeplan.simulation import scenario
from pipeplan.simulation.scenario import Scenario

WORKERS_A_CORE = 32
"""Most workers per core. With more, their own work dominates the measurement although their stages sleep."""
MOST_MINIBATCHES = 20_000
LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Prepared:
    """The plan of a plan folder, with the parameters of its emulation."""

    folder: Path
    root: Node
    """The content of plan.json."""
    profile: Profile | None
    plan: Scenario
    rings: Rings
    scaling: Scaling
    minibatches: int

    @property
    def servers(self) -> Part:
        """The tree of switches and cables."""
        return self.rings.servers

    @property
    def pace_s(self) -> float:
        """Predicted seconds per minibatch, of the emulation."""
        return self.plan.predicted_s * self.scaling.time_by

    def order(self, room: Path, limit_s: float, options: Sequence[str]) -> dict[str, Any]:
        """Write the emulated plan into a folder, and return the order to run it, with options for the workers."""
        write_folder(self.folder, self.root, self.profile, self.scaling, self.rings, self.minibatches, room / "plan")
        return {
            "plan": str(room / "plan"),
            "network": network(self.servers, self.scaling),
            "arguments": ["--epochs", "1", "--threads", "1", "--run-dir", str(room / "run"), *options],
            "limit_s": limit_s,
        }


def prepare(folder: Path, profile: Profile | None, seconds: float) -> Prepared:
    """Prepare a replay of so many seconds of training, or more if a steady state needs them.

    Raises `InputError` where the folder has no plan, or the plan has too many workers for this machine.
    """
    plan = scenario.read(folder)
    root = read_document(folder / "plan.json", scenario.FORMAT, scenario.VERSION)
    cluster = from_json(root["cluster"])
    _check_size(cluster.workers)
    rings = Rings(Plan.from_json(root["plan"]), cluster, parts_of(cluster))
    scaling = scaling_for(plan, [rings.inflation(index) for index in range(len(plan.stages))])
    count = _minibatches(plan, seconds / scaling.time_by)
    return Prepared(folder, root, profile, plan, rings, scaling, count)


def _check_size(workers: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers > WORKERS_A_CORE * cores:
        raise InputError(
            f"the cluster has {workers} workers, and this machine can emulate {WORKERS_A_CORE * cores}, "
            f"{WORKERS_A_CORE} for each core; replay a plan for fewer --servers"
        )


def _minibatches(plan: Scenario, seconds: float) -> int:
    """The number of minibatches in so many seconds at the predicted pace, but enough for a steady state."""
    length = measured.round_of(plan)
    spare = measured.warm_up(plan) + plan.in_flight
    wanted = max(seconds / plan.predicted_s, (spare + LEAST_ROUNDS * length) * 1.2)
    whole = math.ceil(wanted / length) * length
    return min(max(whole, length), MOST_MINIBATCHES)

"""The report of `pipeplan replan` on the new plan: old and new step time, moved layers, and commands that resume.

`--relax` drops options of the old plan. `helpful_options` finds options whose removal would make a new plan possible.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.plan.plan import Plan
from pipeplan.planning.baselines import listed_plan
from pipeplan.planning.outcome import Outcome
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.rendering.plan_json import plan_document
from pipeplan.replanning.migration import BatchChange, PlanChanges, plan_changes
from pipeplan.replanning.remaining_cluster import RemainingCluster
from pipeplan.run_data.run_folder import Checkpoint
from pipeplan.solvers.dp import dynamic_program
from pipeplan.util.deadline import NO_DEADLINE, Deadline, OutOfTime
from pipeplan.util.text import path_word, program_word

FORMAT, VERSION = "pipeplan-replan", 1
_RELAXABLE = {
    "stages": ("stages", "max_stages"),
    "max-replicas": ("max_replicas",),
    "max-workers": ("max_workers",),
    "pin": ("pins",),
    "together": ("together",),
    "grid": ("grid",),
    "no-recompute": ("recompute",),
}
"""By option of `pipeplan solve`, the fields of `Options` that it sets."""
_MOST_CUTS = 2000
"""Number of cuts above which only the cuts of one order of the layers are enumerated, as in `solve`."""


@dataclass(frozen=True)
class OldPlan:
    """The old plan with its cluster and step time."""

    folder: Path
    plan: Plan
    cluster: Cluster
    minibatch: int
    step_time_s: float
    """Predicted seconds per minibatch."""


@dataclass(frozen=True)
class LaunchCommand:
    """The command that starts the new plan on one server."""

    server: int
    was: int | None
    """The old index of the server; None if it is unknown."""
    environment: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...]

    @property
    def text(self) -> str:
        """The command as a line for a shell."""
        return " ".join([*(f"{name}={value}" for name, value in self.environment), shlex.join(self.arguments)])


@dataclass(frozen=True)
class ReplanReport:
    """A new plan compared with the old plan."""

    old: OldPlan
    left: RemainingCluster
    lost: tuple[str, ...]
    """The lost servers and workers as the user named them; empty if the cluster was replaced."""
    outcome: Outcome
    folder: Path | None
    """Folder of the new plan; None if it was not written."""
    checkpoint: Checkpoint | None

    @property
    def moves(self) -> PlanChanges:
        """The changes for every layer and worker."""
        return plan_changes(
            self.old.plan, self.outcome.plan, self.left, self.outcome.problem.profile, self.old.minibatch
        )

    @property
    def samples_per_s(self) -> tuple[float, float]:
        """Samples per second of the old plan and of the new plan."""
        now = self.outcome.problem.profile.minibatch / self.outcome.predicted_s
        return self.old.minibatch / self.old.step_time_s, now

    @property
    def commands(self) -> list[LaunchCommand]:
        """The command of each server that starts the new plan. Empty if the plan was not written, or has no model."""
        if self.folder is None or not self.outcome.problem.profile.model_ref:
            return []
        resume = [] if self.checkpoint is None else ["--resume-from", path_word(self.checkpoint.resume_from)]
        arguments = (program_word(self.folder / "launch.sh"), *resume)
        return [
            LaunchCommand(number, self._server_was(number), tuple(self._environment(number)), arguments)
            for number in range(self._servers)
        ]

    @property
    def _servers(self) -> int:
        """Number of servers on which the new plan starts workers."""
        busy = (worker for stage in self.outcome.plan.stages for worker in stage.workers)
        return self.left.cluster.servers_up_to(busy)

    def _server_was(self, number: int) -> int | None:
        return self.left.servers[number] if self.left.servers else None

    def _environment(self, number: int) -> list[tuple[str, str]]:
        rank = [("NODE_RANK", str(number))] if self._servers > 1 else []
        return rank + self._devices(number)

    def _devices(self, number: int) -> list[tuple[str, str]]:
        """CUDA_VISIBLE_DEVICES with the remaining GPUs of a server; empty if these are its first GPUs."""
        cluster = self.left.cluster
        if cluster.device.kind != "cuda" or not self.left.workers:
            return []
        first, end = cluster.starts(cluster.server_level)[number : number + 2]
        begins = self.old.cluster.starts(self.old.cluster.server_level)[self.left.servers[number]]
        kept = [self.left.workers[worker] - begins for worker in range(first, end)]
        return [] if kept == list(range(len(kept))) else [("CUDA_VISIBLE_DEVICES", ",".join(map(str, kept)))]

    def to_json(self) -> dict[str, Any]:
        """The document that `pipeplan replan --json` prints; docs/file-formats.md describes it."""
        moved, (before, now) = self.moves, self.samples_per_s
        return {
            "format": FORMAT,
            "version": VERSION,
            "from": str(self.old.folder),
            "folder": None if self.folder is None else str(self.folder),
            "lost": list(self.lost),
            "before": {
                "config": self.old.plan.config,
                "workers": self.old.cluster.workers,
                "minibatch_s": self.old.step_time_s,
                "samples_per_s": before,
            },
            "now": {
                "config": self.outcome.plan.config,
                "workers": self.left.cluster.workers,
                "minibatch_s": self.outcome.predicted_s,
                "samples_per_s": now,
            },
            "throughput": now / before,
            "servers": [
                {"server": number, "was": self._server_was(number)} for number in range(self.left.cluster.servers)
            ],
            "workers": [asdict(worker) for worker in moved.workers],
            "layers": [asdict(shift) for shift in moved.shifts],
            "updates": [_updates(batch) for batch in moved.batches],
            "read_bytes": moved.read_bytes,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.to_json(),
            "commands": [
                {
                    "server": command.server,
                    "environment": dict(command.environment),
                    "arguments": list(command.arguments),
                }
                for command in self.commands
            ],
            "plan": plan_document(self.outcome),
        }


def _updates(batch: BatchChange) -> dict[str, Any]:
    return asdict(batch) | {"rate": batch.rate}


RELAXED: dict[str, dict[str, Any]] = {
    option: {field: getattr(Options(), field) for field in names} for option, names in _RELAXABLE.items()
}
"""The fields of `Options` that each option of `pipeplan solve` sets, with their defaults, by option."""


def relax_options(options: Options, names: Iterable[str]) -> Options:
    """The options without the constraints that `names` (keys of `RELAXED`) set."""
    changes = {field: value for name in names for field, value in RELAXED[name].items()}
    if "stages" in changes and options.is_listed:
        changes |= {"sharding": Sharding.NONE, "unequal_shares": False}  # Only plans of one stage have these fields.
    return replace(options, **changes)


def helpful_options(problem: Problem, deadline: Deadline = NO_DEADLINE) -> list[str]:
    """Options of `pipeplan replan` that each make the infeasible problem feasible."""
    options = [
        f"--relax {name}"
        for name in RELAXED
        if (free := relax_options(problem.options, [name])) != problem.options
        and _fits(replace(problem, options=free), deadline)
    ]
    if problem.profile.dynamic_batch:
        options += [f"--microbatch {size}" for size in _first_that_fits(problem, deadline)]
    return options


def _first_that_fits(problem: Problem, deadline: Deadline) -> Iterator[int]:
    """Halve the minibatch until the problem is feasible, and yield that size; empty if no size is feasible."""
    size = problem.profile.minibatch // 2
    while size >= 1:
        if _fits(replace(problem, profile=problem.profile.rescaled(size)), deadline):
            yield size
            return
        size //= 2


def _fits(problem: Problem, deadline: Deadline) -> bool:
    """Whether a plan of the problem is found to exist before the deadline."""
    if problem.options.is_listed:
        return listed_plan(problem) is not None
    try:
        return dynamic_program.is_feasible(problem, enumerate_cuts(problem, _MOST_CUTS, deadline), deadline.at)
    except OutOfTime:
        return False

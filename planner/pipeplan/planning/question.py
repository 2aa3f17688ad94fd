"""The question of a choice: a model, a cluster, a global batch, the allowed age of gradients, and constraints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.plan.schedules import FLUSH
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.rescale import halved

ANY = float("inf")
"""The staleness that allows gradients of any age."""


@dataclass(frozen=True)
class Machines:
    """A profile and a cluster that a candidate may be planned for."""

    profile: Profile
    cluster: Cluster


@dataclass(frozen=True)
class Question:
    """The problem that a plan is chosen for."""

    machines: Machines
    options: Options
    """The user's constraints. The choice determines schedule, correction and microbatches per update."""
    batch: int | None = None
    """Global batch in samples; None for one microbatch per worker."""
    minibatch: int | None = None
    """Microbatch size in samples; None for the best one."""
    staleness: float = 0
    """Largest allowed age of gradients, in updates; `ANY` for no limit."""
    alone: Machines | None = None
    """A single worker that has the machine to itself, for machines whose workers share cores; else None."""
    maximum_cuts: int = 50_000
    simulates: bool = True

    @property
    def samples(self) -> int:
        """The global batch in samples."""
        if self.batch is not None:
            return self.batch
        workers = min(self.machines.cluster.workers, self.options.max_workers or self.machines.cluster.workers)
        return workers * (self.minibatch or self.machines.profile.minibatch)

    @property
    def sizes(self) -> tuple[list[int], list[int]]:
        """(microbatch sizes to try, extrapolated microbatch sizes), as `sizes_for` returns them."""
        return sizes_for(self.machines.profile, self.samples, self.minibatch)

    def problem(self, size: int, **changes: Any) -> Problem:
        """The problem of training the global batch in microbatches of a size, as `problem_of` builds it."""
        return problem_of(self.machines, self.options, size, self.samples, **changes)


def microbatches(batch: int, size: int) -> int:
    """The number of microbatches of a size in a global batch.

    Raises `InputError` if the size does not divide the batch.
    """
    if batch < 1 or batch % size:
        raise InputError(f"a batch of {batch} samples cannot be cut into microbatches of {size}: give a multiple")
    return batch // size


def sizes_for(profile: Profile, batch: int, given: int | None) -> tuple[list[int], list[int]]:
    """(microbatch sizes with measured or interpolated times, further sizes); all divide the batch; largest first.

    Raises `InputError` if no size divides the batch.
    """
    measured = [size.minibatch for size in profile.all_sizes]
    if given is not None:
        microbatches(batch, given)
        return [given], []
    tried = sorted({*measured, *halved(profile.minibatch)}, reverse=True)
    dividing = [size for size in tried if batch % size == 0]
    if not dividing:
        raise InputError(
            f"a batch of {batch} samples cannot be cut into microbatches of {', '.join(map(str, tried))}: "
            "give --batch a multiple, or --microbatch another size"
        )
    known = [size for size in dividing if measured[0] <= size <= measured[-1]]
    return known, [size for size in dividing if size not in known]


def sized(profile: Profile, size: int) -> Profile:
    """The profile at a microbatch size. Times that were not measured are upper bounds."""
    return profile if size == profile.minibatch else profile.rescaled(size, pessimistic=True)


def problem_of(machines: Machines, options: Options, size: int, batch: int, **changes: Any) -> Problem:
    """The problem of training a global batch in microbatches of a size.

    The schedule is 1f1b-flush unless `changes` has another.
    """
    chosen: dict[str, Any] = {
        "schedule": FLUSH,
        "accumulate": batch // size,
        "correction": "none",
        "virtual_stages": None,
    } | changes
    return Problem(sized(machines.profile, size), machines.cluster, replace(options, **chosen))

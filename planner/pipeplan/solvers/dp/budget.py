"""The limits and the effort of a search over cuts, and the stages that it finds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import OutOfTime as OutOfTime  # the searches raise it, and their callers import it here

# Relative amount by which rounding may raise a time that equals the threshold.
SLACK = 1e-12


STEP = 1000
"""The fixed cost of a search step, in rows."""


@dataclass(eq=False)
class SearchEffort:
    """The cost of searches, in table rows that they go through, so that it is the same on every machine."""

    most: float = float("inf")
    """The most rows that the searches may go through."""
    spent: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the searches took more than they may."""
        return self.spent > self.most


@dataclass(frozen=True)
class StateCounts:
    """The counts of stages and workers by which the search tells states apart."""

    stages: bool = False
    """Fewer stages are better."""
    exact_stages: bool = False
    """Only states with equally many stages compare."""
    workers: bool = False
    """Fewer busy workers are better."""

    @property
    def any(self) -> bool:
        """Whether states differ in more than their position and their demand."""
        return self.stages or self.exact_stages or self.workers


@dataclass(frozen=True)
class SearchLimits:
    """The limits of a search, apart from its threshold."""

    memory: bool
    """Whether the devices' memory is limited."""
    recompute: bool = False
    """Whether stages may recompute their forward pass."""
    counting: StateCounts = field(default_factory=StateCounts)
    exact_stages: int | None = None
    max_stages: int | None = None
    max_workers: int | None = None
    deadline: float | None = None
    """When to stop, by `time.perf_counter`."""
    effort: SearchEffort = field(default_factory=SearchEffort)
    """The effort that this and other searches share."""
    every_cut: bool = False
    """Whether the caller needs the states of all cuts, including those of cuts that others make superfluous."""
    shape: GridShape | None = None
    """The shape of the uniform grid to search for, which fixes the workers of every stage; None for any plan."""
    coarse: bool = False
    """Whether a search for batches on equal servers tries only powers of two as numbers of replicas, to find some plan
    soon."""
    fitting: bool = False
    """Whether a search for batches finds any pipeline that fits in memory, however slow: it compares states without
    their times."""

    def step(self, rows: float = 0) -> None:
        """Count a step through so many rows. Raises `OutOfTime` after the deadline or if the effort is exceeded."""
        self.effort.spent += STEP + rows
        if self.effort.over or (self.deadline is not None and time.perf_counter() > self.deadline):
            raise OutOfTime


def limits_of(
    problem: Problem,
    *,
    memory: bool,
    deadline: float | None,
    shape: GridShape | None = None,
    effort: SearchEffort | None = None,
) -> SearchLimits:
    """The limits that a problem's options imply for a search in one copy of the pipeline, with or without memory."""
    options = problem.options
    limited = memory and options.memory
    return SearchLimits(
        memory=limited,
        recompute=limited and options.recompute and problem.training,
        counting=StateCounts(
            exact_stages=options.stages is not None or bool(options.pins) or shape is not None,
            stages=options.max_stages is not None,
            workers=options.max_workers is not None,
        ),
        exact_stages=options.stages if shape is None else shape.stages,
        max_stages=options.max_stages,
        # The option counts the workers of all copies together.
        max_workers=None if options.max_workers is None else options.max_workers // problem.copies,
        deadline=deadline,
        effort=effort or SearchEffort(),
        shape=shape,
    )


@dataclass(frozen=True)
class Step:
    """One transition of the search: the stage between two cuts, by their indices, and where it lies.

    Only searches use steps; their results are `plan.Stage` objects.
    """

    start: int
    """The cut at which the stage begins; `end` is the cut at which it ends."""
    end: int
    first: int
    """The first worker. The stage's workers are first … first + replicas - 1."""
    replicas: int
    depth: int
    recompute: bool

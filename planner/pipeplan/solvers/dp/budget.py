"""The limits of a search over cuts, the count of its steps, and the stages that it finds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem
from pipeplan.util.deadline import OutOfTime as OutOfTime  # raised here, and imported from here by callers

# Relative amount by which rounding may raise a time above a threshold that it equals.
SLACK = 1e-12


STEP = 1000
"""The fixed cost of a search step, in rows."""


@dataclass(eq=False)
class SearchEffort:
    """The table rows that searches have processed. Unlike seconds, this count is the same on every machine."""

    most: float = float("inf")
    """Largest number of rows that the searches may process."""
    spent: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the searches processed more rows than allowed."""
        return self.spent > self.most


@dataclass(frozen=True)
class StateCounts:
    """The counts of stages and workers by which the search compares states."""

    stages: bool = False
    """Whether a state with fewer stages is better."""
    exact_stages: bool = False
    """Whether only states with the same number of stages are compared."""
    workers: bool = False
    """Whether a state with fewer busy workers is better."""

    @property
    def any(self) -> bool:
        """Whether any count matters, in addition to a state's position and demand."""
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
    """Time at which the search stops, by `time.perf_counter`; None for no limit."""
    effort: SearchEffort = field(default_factory=SearchEffort)
    """The count of rows, which this and other searches share."""
    every_cut: bool = False
    """Whether the caller needs the states of all cuts, including superfluous cuts."""
    shape: GridShape | None = None
    """The shape of the uniform grid to search for, which fixes the workers of every stage; None for any plan."""
    coarse: bool = False
    """Whether a search for batches on equal servers tries only powers of two as numbers of replicas, in order to find
    some plan soon."""
    fitting: bool = False
    """Whether a search for batches accepts any pipeline that fits in memory, however slow. Such a search ignores the
    times of states."""

    def step(self, rows: float = 0) -> None:
        """Count a step through `rows` rows. Raises `OutOfTime` after the deadline or beyond the limit on rows."""
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
        # The option limits the workers of all copies together.
        max_workers=None if options.max_workers is None else options.max_workers // problem.copies,
        deadline=deadline,
        effort=effort or SearchEffort(),
        shape=shape,
    )


@dataclass(frozen=True)
class Step:
    """One transition of the search: the stage between two cuts, by their indices, and its workers.

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

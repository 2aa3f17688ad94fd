"""What a search is asked for, and what it answers with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pipeplan.grid import Shape
from pipeplan.problem import Problem

# What rounding may add to a time that equals the threshold.
SLACK = 1e-12


_STEP = 1000
"""Rows that take as long as what a step takes besides."""


class OutOfTime(Exception):
    """The deadline passed in the middle of a search, or it took more than it may."""


@dataclass(eq=False)
class Effort:
    """What searches take, in rows of tables that they go through: the same on every machine, however busy."""

    most: float = float("inf")
    spent: float = 0.0

    @property
    def over(self) -> bool:
        """Whether it was more than it may be."""
        return self.spent > self.most


@dataclass(frozen=True)
class Counting:
    """Which counts tell two states apart."""

    stages: bool = False
    """Fewer stages are better."""
    exact_stages: bool = False
    """Only states with equally many stages compare."""
    workers: bool = False
    """Fewer busy workers are better."""

    @property
    def any(self) -> bool:
        """Whether there is more to a state than its place and its demand."""
        return self.stages or self.exact_stages or self.workers


@dataclass(frozen=True)
class Limits:
    """What a search is asked for, beside the threshold."""

    memory: bool
    """Whether the devices' memory limits."""
    recompute: bool = False
    """Whether stages may compute their forward pass twice."""
    counting: Counting = field(default_factory=Counting)
    exact_stages: int | None = None
    max_stages: int | None = None
    several: bool = False
    """Two stages at least."""
    max_workers: int | None = None
    deadline: float | None = None
    """By `time.perf_counter`."""
    effort: Effort = field(default_factory=Effort)
    """What this and other searches may take together."""
    every_cut: bool = False
    """Whether the states of all cuts are wanted, also of those that another cut makes superfluous."""
    shape: Shape | None = None
    """Where a uniform grid is looked for, which: that fixes the workers of every stage."""

    def step(self, rows: float = 0) -> None:
        """Count a step through so many rows. Raises `OutOfTime` at the deadline, or where it is one too many."""
        self.effort.spent += _STEP + rows
        if self.effort.over or (self.deadline is not None and time.perf_counter() > self.deadline):
            raise OutOfTime


def limits_of(
    problem: Problem,
    *,
    memory: bool,
    deadline: float | None,
    shape: Shape | None = None,
    effort: Effort | None = None,
) -> Limits:
    """What a problem's options ask of a search in one copy of the pipeline, with the limit on memory or without."""
    options = problem.options
    limited = memory and options.memory
    return Limits(
        memory=limited,
        recompute=limited and options.recompute and problem.training,
        counting=Counting(
            exact_stages=options.stages is not None or bool(options.pins) or shape is not None,
            stages=options.max_stages is not None,
            workers=options.max_workers is not None,
        ),
        exact_stages=options.stages if shape is None else shape.stages,
        max_stages=options.max_stages,
        several=options.several,
        # The option counts the workers of all copies together.
        max_workers=None if options.max_workers is None else options.max_workers // problem.copies,
        deadline=deadline,
        effort=effort or Effort(),
        shape=shape,
    )


@dataclass(frozen=True)
class Step:
    """One stage of a pipeline that a search found."""

    start: int
    """The cuts that it lies between."""
    end: int
    first: int
    """Its workers are first … first + replicas - 1."""
    replicas: int
    depth: int
    recompute: bool

"""Proves how much faster another plan of a question could be, by relaxations and by exact searches.

`solvers/update_bound.py` bounds the plans of one microbatch size in about a second. The smallest of these bounds limits
the answer, so its interval is halved first. For plans of one stage the formulas are exact. So the bound on all plans is
the smaller of two times: the bound on pipelines, and the time of the fastest plan of one stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeplan.errors import InputError
from pipeplan.planning.figure import TOLERANCE
from pipeplan.planning.question import Question
from pipeplan.solvers.cut_groups import MainUnits
from pipeplan.solvers.update_bound import UpdateBound
from pipeplan.util.deadline import Deadline, OutOfTime

PRECISION = 0.01
"""Relative precision to which the smallest bound is determined."""
MOST = 16.0
"""If no plan is known, bounds are searched up to this multiple of the time in which all workers always compute."""


@dataclass(frozen=True)
class Proven:
    """Lower bounds on the seconds per sample of the synchronous plans of a question."""

    flush: Mapping[int, float]
    """Bound for all plans of 1f1b-flush, by microbatch size."""
    split: Mapping[int, float]
    """Bound for all plans of 1f1b-flush and of zb-h1, by microbatch size."""
    divided_s: float
    """Seconds per sample of the fastest allowed plan that divides the weights; infinite if there is none. All such
    plans are tried."""

    @property
    def sample_s(self) -> float:
        """Lower bound on all plans of 1f1b-flush and all plans that divide the weights, in seconds per sample."""
        return min(self.divided_s, min(self.flush.values(), default=0.0))

    def step_s(self, size: int, solved_s: float, *, splits: bool, solved_all: bool) -> float:
        """Lower bound on every synchronous plan of the question, in seconds per microbatch of a size.

        `splits` includes the plans of zb-h1. `solved_s` is the bound that the solvers have proven for the problem of
        the taken plan. This bound counts if that problem contains all plans of its schedule and size (`solved_all`).
        """
        bounds = dict(self.split if splits else self.flush)
        if not bounds:
            return min(solved_s, self.divided_s * size)
        if solved_all:
            bounds[size] = max(bounds.get(size, 0.0), solved_s / size)
        return min(self.divided_s * size, *(bound * size for bound in bounds.values()))


class Bounds:
    """Lower bounds on the pipelines of a question by microbatch size, in seconds per sample. Searches raise them."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self.searched: dict[int, float] = {}
        """Bound for all plans of 1f1b-flush from exact searches, by microbatch size."""
        self.one_stage_s = float("inf")
        """Seconds per sample, by the formulas, of the fastest plan of one stage that keeps whole weights."""
        self._relaxations: dict[bool, Relaxation] = {}

    def learn(self, size: int, sample_s: float) -> None:
        """Record the bound that an exact search has proven for 1f1b-flush."""
        self.searched[size] = max(self.searched.get(size, 0.0), sample_s)

    def relaxed(self, size: int, *, splits: bool) -> float:
        """The bound of the relaxations for 1f1b-flush, and with `splits` also for zb-h1; 0 if they prove nothing."""
        kinds = [one for of_both, one in self._relaxations.items() if of_both or not splits]
        return min(self.one_stage_s, max((one.bounds.get(size, 0.0) for one in kinds), default=0.0))

    def tighten(self, sizes: Sequence[int], best_sample_s: float, deadline: Deadline) -> None:
        """Raise the bounds on the pipelines of all sizes, first of 1f1b-flush and zb-h1 together, then of 1f1b-flush
        alone."""
        options = self._question.options
        if options.grid or options.stages == 1 or not (sizes and self._question.simulates):
            return
        both = self._relaxations.setdefault(True, Relaxation(self._question, splits=True))
        both.tighten(sizes, best_sample_s, deadline)
        flush = self._relaxations.setdefault(False, Relaxation(self._question, splits=False))
        flush.main = both.main
        flush.bounds = {
            size: max(one.get(size, 0.0) for one in (flush.bounds, both.bounds, self.searched)) for size in sizes
        }
        flush.tighten(sizes, best_sample_s, deadline)

    def proven(self, best_sample_s: float, divided_s: float) -> Proven:
        """The bounds on the searched plans, each at most the time of the fastest plan."""
        flush = {size: max(bound, self.relaxed(size, splits=False)) for size, bound in self.searched.items()}
        split = {size: self.relaxed(size, splits=True) for size in self.searched if self._relaxations}
        least = {size: min(best_sample_s, bound) for size, bound in flush.items()}
        return Proven(least, {size: min(best_sample_s, bound) for size, bound in split.items()}, divided_s)


@dataclass
class Relaxation:
    """The bounds on the pipelines of one schedule."""

    question: Question
    splits: bool
    """Whether the bounds hold for zb-h1 as well as for 1f1b-flush."""
    main: MainUnits | None = None
    """The units whose cuts are counted; None until they are known."""
    bounds: dict[int, float] = field(default_factory=dict)
    """Lower bound by microbatch size, in seconds per sample."""
    _known: dict[int, UpdateBound] = field(default_factory=dict, repr=False)

    def tighten(self, sizes: Sequence[int], best_sample_s: float, deadline: Deadline) -> None:
        """Raise the smallest bound until it stops rising, is near the best known figure, or the deadline passes."""
        samples, ends = self.question.samples, dict[int, float]()
        try:
            for size in sizes:
                one = self._of(size, deadline)
                if one is None:
                    return
                self.bounds[size] = max(self.bounds.get(size, 0.0), one.floor_s / samples)
                ends[size] = min(best_sample_s, MOST * self.bounds[size])
            unasked = set(sizes)
            while True:
                size = min(ends, key=self.bounds.__getitem__)
                low, high = self.bounds[size], ends[size]
                if high <= low * (1 + PRECISION) or low * (1 + TOLERANCE) >= best_sample_s:
                    return
                # First try the best figure, because most sizes cannot reach it.
                first = size in unasked and best_sample_s < float("inf")
                middle = high if first else (low * high) ** 0.5
                unasked.discard(size)
                if not self._known[size].may_fit(middle * samples, deadline):
                    self.bounds[size] = middle
                else:
                    ends[size] = middle
        except (OutOfTime, InputError):
            return

    def _of(self, size: int, deadline: Deadline) -> UpdateBound | None:
        """The bound for one size; None if there are too many cuts."""
        if size not in self._known:
            problem = self.question.problem(size)
            self.main = self.main or MainUnits.of(problem, deadline)
            if self.main is None:
                return None
            self._known[size] = UpdateBound(problem, self.main.cuts(problem), self.splits)
        return self._known[size]

"""Proves how much faster another plan of a question could be: a relaxation of all microbatch sizes, and exact searches.

`solvers/update_bound.py` bounds the plans of one microbatch size in a second or so. The size whose bound is the least
decides, so that its interval is halved first. Plans of one stage are candidates of their own, whose formulas are exact:
the bound is that of pipelines, or the fastest one-stage plan's where that is less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeplan.errors import InputError
from pipeplan.planning.candidates import Machines, problem_of
from pipeplan.planning.figure import TOLERANCE
from pipeplan.problem.options import Options
from pipeplan.solvers.cut_groups import MainUnits
from pipeplan.solvers.update_bound import UpdateBound
from pipeplan.util.deadline import Deadline, OutOfTime

PRECISION = 0.01
"""Relative. The bound of the least size is within this of the best one that the relaxation gives."""
MOST = 16.0
"""Where no plan is known, bounds are sought up to so many times the time in which all workers compute."""


@dataclass
class Relaxation:
    """Lower bounds on the seconds per sample of the pipelines of one schedule, by microbatch size."""

    machines: Machines
    options: Options
    samples: int
    """The global batch."""
    splits: bool
    """Whether they hold for zb-h1 as well, and not for 1f1b-flush alone."""
    bounds: dict[int, float] = field(default_factory=dict)
    main: MainUnits | None = None
    """The units whose cuts are counted, once they are known."""
    _known: dict[int, UpdateBound] = field(default_factory=dict, repr=False)

    def learn(self, bounds: Mapping[int, float]) -> None:
        """Take over bounds that are proven otherwise."""
        self.bounds |= {size: max(bound, self.bounds.get(size, 0.0)) for size, bound in bounds.items()}

    def tighten(self, sizes: Sequence[int], best_sample_s: float, deadline: Deadline) -> None:
        """Raise the least bound until it stays, it is near the best figure that is known, or the deadline comes."""
        ends = {}
        try:
            for size in sizes:
                one = self._of(size, deadline)
                if one is None:
                    return
                self.bounds[size] = max(self.bounds.get(size, 0.0), one.floor_s / self.samples)
                ends[size] = min(best_sample_s, MOST * self.bounds[size])
            unasked = set(sizes)
            while True:
                size = min(ends, key=self.bounds.__getitem__)
                low, high = self.bounds[size], ends[size]
                if high <= low * (1 + PRECISION) or low * (1 + TOLERANCE) >= best_sample_s:
                    return
                # Most sizes cannot reach the best figure, which one question shows.
                first = size in unasked and best_sample_s < float("inf")
                middle = high if first else (low * high) ** 0.5
                unasked.discard(size)
                if not self._known[size].may_fit(middle * self.samples, deadline):
                    self.bounds[size] = middle
                else:
                    ends[size] = middle
        except (OutOfTime, InputError):
            return

    def _of(self, size: int, deadline: Deadline) -> UpdateBound | None:
        """The bound for one size; None where its cuts are too many."""
        if size not in self._known:
            problem = problem_of(self.machines, self.options, size, self.samples)
            self.main = self.main or MainUnits.of(problem, deadline)
            if self.main is None:
                return None
            self._known[size] = UpdateBound(problem, self.main.cuts(problem), self.splits)
        return self._known[size]

"""Every plan of a small problem, scored from first principles: an oracle that shares no code with the planner.

It takes the problem as plain lists and dictionaries and writes the formulas of docs/cost-model.md out again (in
`brute_formulas`). It enumerates the stages from the output to the input, each with its layers, its workers and whether
it recomputes; a branch is left where what it has already is no better than the best plan so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from brute_cards import Cards
from brute_formulas import Costs, Stage
from brute_machines import Instance, Machines, grid_sizes

__all__ = ["Best", "Instance", "best", "best_plan"]

HALVINGS = 60
"""Of the interval of paces between what the resources allow and what memory does."""


@dataclass
class Best:
    """The fastest plan so far."""

    pace: float = math.inf
    stages: tuple[Stage, ...] = ()
    depths: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    copies: int = 1
    size: int = 0
    """Workers that one copy has to itself."""


def best(instance: Instance) -> float:
    """The pace of the fastest plan over all plan spaces, infinite where nothing fits."""
    return best_plan(instance).pace


def best_plan(instance: Instance) -> Best:
    """The fastest plan over all plan spaces: one pipeline, or one in each of several alike components of some level."""
    found = Best()
    machines = Machines(instance)
    for first, size, copies in machines.copies():
        if copies == 1 or (instance.allow_copies and not instance.grid):
            for used in machines.subsets(first, size) if copies > 1 else [set(range(first, first + size))]:
                Pipelines(instance, machines, used, size, copies, found).search()
    return found


class Pipelines:
    """All pipelines on the workers `used` of a component of `workers`, of which there are `copies` in all."""

    def __init__(
        self, instance: Instance, machines: Machines, used: set[int], workers: int, copies: int, found: Best
    ) -> None:
        self.instance = instance
        self.used = used
        self.first = min(used)
        self.stop = max(used) + 1
        self.workers = workers
        self.copies = copies
        self.found = found
        self.costs = costs = Costs(instance, copies, machines, (used, workers))
        self.smaller = {after: [cut for cut in costs.cuts if cut & after == cut != after] for after in costs.cuts}
        self.cards = Cards(costs, workers)
        self.busy = workers if instance.max_workers is None else min(workers, instance.max_workers // copies)
        # Where it recomputes a stage is slower: worth nothing unless memory limits.
        spare = instance.recompute and not instance.inference and not math.isinf(instance.memory)
        self.modes = (False, True) if spare else (False,)

    def search(self) -> None:
        """Put the fastest pipeline in `found` if it is faster than what is there."""
        most = min(len(self.instance.layers), self.busy, self.instance.max_stages or self.busy)
        for count in range(1, most + 1):
            if self.instance.stages in (None, count):
                self._extend((), count)

    def _extend(self, behind: tuple[Stage, ...], missing: int) -> None:
        """Put stages in front of those `behind`, `missing` of them."""
        after = behind[0].before if behind else self.costs.everything
        for before in self.smaller[after]:
            if (before == 0) != (missing == 1) or not self._pinned(before, after, missing):
                continue
            for start, end in self._runs(behind, missing):
                for recompute in self.modes:
                    chain = (self.costs.stage(before, after, start, end, recompute), *behind)
                    if not self._promising(chain, missing - 1):
                        continue
                    if missing == 1:
                        self._finish(chain)
                    else:
                        self._extend(chain, missing - 1)

    def _runs(self, behind: tuple[Stage, ...], missing: int) -> Iterator[tuple[int, int]]:
        """Runs of workers for one more stage, with room left for the others."""
        free = self.busy - sum(stage.replicas for stage in behind) - (missing - 1)
        most = min(free, self.instance.max_replicas or free)
        stop = behind[0].start if behind else self.stop
        if self.instance.grid:
            # Of stages alike from the first worker on, the last one's end and size say where all the others are.
            yield from ((start, end) for start, end in self._alike(behind, missing) if end - start <= most)
            return
        for end in range(stop, self.first + missing - 1, -1):
            for start in range(max(self.first + missing - 1, end - most), end):
                if self.used.issuperset(range(start, end)):
                    yield start, end

    def _alike(self, behind: tuple[Stage, ...], missing: int) -> Iterator[tuple[int, int]]:
        if behind:
            yield behind[0].start - behind[0].replicas, behind[0].start
            return
        for end in grid_sizes(self.instance):
            shared = (self.instance.accumulate or 0) if not self.instance.inference else 0
            if end % missing == 0 and shared % (end // missing) == 0:
                yield end - end // missing, end

    def _pinned(self, before: int, after: int, number: int) -> bool:
        mine = after & ~before
        return all((mine >> layer & 1) == (stage == number) for layer, stage in self.instance.pins)

    def _promising(self, chain: tuple[Stage, ...], missing: int) -> bool:
        """Whether a pipeline that ends in these stages may still beat the best one so far."""
        costs, best = self.costs, self.found.pace
        number = costs.floor(chain)
        if missing and not costs.flushes:
            number = max(number, costs.least[chain[0].before] / (chain[0].start - self.first))
        if costs.total(chain, number) >= best:
            return False
        # More time never takes more memory: what does not fit at the pace to be beaten fits at none below it.
        return costs.fits(chain, costs.most(chain, best), whole=not missing)

    def _finish(self, chain: tuple[Stage, ...]) -> None:
        """The least pace at which a whole pipeline fits."""
        costs = self.costs
        low = costs.floor(chain)
        if not costs.fits(chain, low):
            high = costs.longest(chain)
            if not costs.fits(chain, high):
                return
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                low, high = (low, middle) if costs.fits(chain, middle) else (middle, high)
            low = high
        pace = costs.total(chain, low)
        if self.instance.contention:
            pace = max(pace, self.cards.busiest(chain), self.cards.wait(chain))
        if pace < self.found.pace:
            depths = costs.depths(chain, low)
            assert depths is not None
            self.found.depths, self.found.versions = tuple(depths), tuple(costs.versions(chain, depths))
            self.found.pace, self.found.stages = pace, chain
            self.found.copies, self.found.size = self.copies, self.workers

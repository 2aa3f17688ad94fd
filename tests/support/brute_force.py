"""Every plan of a small problem, scored from first principles: an oracle that shares no code with the planner.

It takes the problem as plain lists and dictionaries and writes the formulas of docs/cost-model.md out again (in
`brute_formulas`). It enumerates the stages from the output to the input, each with its layers, its workers and whether
it recomputes; a branch is left where what it has already is no better than the best plan so far.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from brute_formulas import ACCUMULATING, Costs, Stage
from brute_machines import Component, Instance, Machines, grid_sizes

# How busy the network cards of a plan are, for the oracle: minibatch by minibatch, and ring hop by ring hop; and the
# cores that workers share, worker by worker.

Operation = Literal["allreduce", "message"]


class Cards:
    """Seconds per minibatch that each card is busy, in each direction."""

    def __init__(self, costs: Costs, size: int) -> None:
        self.costs = costs
        self.size = size
        """Workers that one copy has to itself."""
        levels = costs.machines.components
        self.parents = [parent for level in levels[1:] for parent in level if len(parent.inside) > 1]
        self.busy: dict[tuple[Component, str], float] = defaultdict(float)

    def busiest(self, chain: Sequence[Stage]) -> float:
        """The most that any card is busy for one minibatch of all copies together."""
        self.busy.clear()
        copies = self.costs.copies
        for copy in range(copies):
            for stage, following in itertools.pairwise(chain):
                self._boundary(stage, following, copy)
            for stage in () if self.costs.flushes else chain:
                often = self.costs.update if self.costs.instance.kind in ACCUMULATING else stage.replicas * copies
                self._ring(self._workers(stage, copy), stage.weights / often)
        for stage in () if self.costs.flushes else chain:
            for index in range(stage.replicas):
                same = [self._workers(stage, copy)[index] for copy in range(copies)]
                self._ring(same, stage.weights / stage.replicas / self.costs.update)
        return max([*self.busy.values(), self._cores(chain)], default=0.0)

    def wait(self, chain: Sequence[Stage]) -> float:
        """What plain data parallelism takes for a minibatch, if the forward pass waits for the update of the last; 0
        where the plan is none."""
        instance, machines = self.costs.instance, self.costs.machines
        if len(chain) > 1 or not self.costs.training or instance.kind in ACCUMULATING:
            return 0.0
        (stage,), copies = chain, self.costs.copies
        everyone = [worker for copy in range(copies) for worker in self._workers(stage, copy)]
        if len(everyone) == 1:
            return 0.0
        rate = machines.rate(everyone)
        speed = min(machines.speeds[worker] for worker in everyone)
        clock, ready, filled, room = stage.forward, 0.0, 0.0, 2.0**20
        if stage.recompute:
            clock += stage.forward
        for layer in reversed(instance.layers):
            clock += layer["b"] / speed
            filled += layer["w"]
            if filled >= room:
                ready = max(ready, clock) + self.costs.exchanged(len(everyone), filled, rate)
                filled, room = 0.0, 25 * 2.0**20
        if filled:
            ready = max(ready, clock) + self.costs.exchanged(len(everyone), filled, rate)
        exposed = max(0.0, ready - clock)
        hidden = max(0.0, self.costs.exchanged(len(everyone), stage.weights, rate) - exposed)
        step = sum(layer.get("t", 0.0) for layer in instance.layers) / speed
        clock += self.costs._own(0, self.costs.everything)[1] / speed
        return (clock + step + exposed + (1 - instance.overlap) * hidden) / len(everyone)

    def _cores(self, chain: Sequence[Stage]) -> float:
        """The most that the cores of a server are busy, if its workers have to share them."""
        instance, machines = self.costs.instance, self.costs.machines
        worked: dict[int, float] = defaultdict(float)
        for stage in chain:
            everyone = sorted(worker for copy in range(self.costs.copies) for worker in self._workers(stage, copy))
            rate = machines.rate(everyone)
            reduces = self.costs.training and not self.costs.flushes
            group = self.costs.exchanged(len(everyone), stage.weights, rate) if reduces else 0.0
            often = self.costs.update if instance.kind in ACCUMULATING else len(everyone)
            for worker in everyone:
                worked[worker] = stage.work / len(everyone) + (1 - instance.overlap) * group / often
        longest = 0.0
        for server in machines.components[1]:
            if 0 < instance.cores < server.stop - server.start:
                total = sum(worked[worker] for worker in range(server.start, server.stop))
                longest = max(longest, total / instance.cores)
        return longest

    def _workers(self, stage: Stage, copy: int) -> list[int]:
        return [copy * self.size + worker for worker in range(stage.start, stage.end)]

    def _boundary(self, stage: Stage, following: Stage, copy: int) -> None:
        senders, receivers = self._workers(stage, copy), self._workers(following, copy)
        there, back = self.costs.crossing(stage.after)
        rounds = math.lcm(len(senders), len(receivers))
        share = 1 / (rounds * self.costs.copies)
        for minibatch in range(rounds):
            sender, receiver = senders[minibatch % len(senders)], receivers[minibatch % len(receivers)]
            self._move(sender, receiver, there * share, "message")
            self._move(receiver, sender, back * share, "message")

    def _ring(self, members: list[int], size: float) -> None:
        """An all-reduce of so many bytes per minibatch: every member passes it on twice, less one share."""
        if self.costs.training and len(members) > 1:
            passes = 3 if self.costs.instance.divided else 2
            each = passes * (len(members) - 1) / len(members) * size
            for one, other in zip(members, [*members[1:], members[0]], strict=True):
                self._move(one, other, each, "allreduce")

    def _move(self, source: int, target: int, size: float, kind: Operation) -> None:
        for parent in self.parents:
            for part, (allreduce, message, _) in zip(parent.inside, parent.links, strict=True):
                leaves = part.start <= source < part.stop
                enters = part.start <= target < part.stop
                if leaves != enters:
                    rate = allreduce if kind == "allreduce" else message
                    self.busy[part, "out" if leaves else "in"] += size / rate


__all__ = ["Best", "Instance", "best", "best_plan"]

HALVINGS = 60
"""Of the interval of step times between what the resources allow and what memory does."""


@dataclass
class Best:
    """The fastest plan so far."""

    step_time: float = math.inf
    stages: tuple[Stage, ...] = ()
    depths: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    copies: int = 1
    size: int = 0
    """Workers that one copy has to itself."""


def best(instance: Instance) -> float:
    """The step time of the fastest plan over all plan spaces, infinite where nothing fits."""
    return best_plan(instance).step_time


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
        costs, best = self.costs, self.found.step_time
        number = costs.floor(chain)
        if missing and not costs.flushes:
            number = max(number, costs.least[chain[0].before] / (chain[0].start - self.first))
        if costs.total(chain, number) >= best:
            return False
        # More time never takes more memory: what does not fit at the step time to be beaten fits at none below it.
        return costs.fits(chain, costs.most(chain, best), whole=not missing)

    def _finish(self, chain: tuple[Stage, ...]) -> None:
        """The least step time at which a whole pipeline fits."""
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
        step_time = costs.total(chain, low)
        if self.instance.contention:
            step_time = max(step_time, self.cards.busiest(chain), self.cards.wait(chain))
        if step_time < self.found.step_time:
            depths = costs.depths(chain, low)
            assert depths is not None
            self.found.depths, self.found.versions = tuple(depths), tuple(costs.versions(chain, depths))
            self.found.step_time, self.found.stages = step_time, chain
            self.found.copies, self.found.size = self.copies, self.workers

"""How busy the network cards of a plan are, for the oracle: minibatch by minibatch, and ring hop by ring hop; and the
cores that workers share, worker by worker."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from brute_formulas import ACCUMULATING, Costs, Stage
from brute_machines import Component

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

"""The stages of pipelines whose batch keeps within a threshold, for schedules with a flush.

A batch takes a sum V over stages and a few bounds, each of which is the longest of a time over stages and boundaries
(docs/cost-model.md, "Flush schedules"). A state has V and the bounds of the stages behind its cut. docs/check.md states
the rules and proves them.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.certificates.charged_stages import ChargedSpace, Hops, StagesAtCut
from pipeplan.checker.document import GPIPE
from pipeplan.checker.figures import ROUNDING
from pipeplan.checker.model import Flags, Floats

Ints = NDArray[np.intp]


class FlushSpace(ChargedSpace):
    """All stages of the pipelines of one space of plans; `threshold` is the longest batch, in seconds."""

    @property
    def parts(self) -> int:
        """V, the bounds on the steady part of every phase, and the bound on the exposed all-reduce."""
        return 2 + self.phases

    @property
    def phases(self) -> int:
        """GPipe has a forward and a backward phase, other schedules one."""
        return 2 if self.document.schedule == GPIPE else 1

    @property
    def covers(self) -> bool:
        """Whether depths depend on what is behind: a replica of GPipe holds all of its minibatches in any case."""
        return self.document.options.memory and self.phases == 1

    @cached_property
    def minibatches(self) -> int:
        """Minibatches of a batch, in the copy that has most."""
        return -(-(self.document.accumulate or 1) // self.copies)

    @cached_property
    def budget_s(self) -> float:
        """The longest batch without the all-reduce among copies."""
        return self.threshold - self.among_s

    @cached_property
    def ahead_s(self) -> tuple[Floats, ...]:
        """For each phase and cut, the passes of one minibatch through the layers inside, on the fastest worker."""
        fastest = max(device.speed for device in self.cluster.devices)
        forward, backward = self.totals.forward_s / fastest, self.totals.backward_s / fastest
        return (forward, backward) if self.phases == 2 else (forward + backward,)

    @cached_property
    def work_s(self) -> Floats:
        """For each cut, all passes of one minibatch through the layers inside, on the fastest worker."""
        return np.asarray(np.sum(self.ahead_s, axis=0))

    @cached_property
    def hidden_s(self) -> Floats:
        """For each cut, the work of the layers inside on the fastest worker of all, which hides an all-reduce."""
        fastest = max(device.speed for device in self.document.cluster.devices)
        return np.asarray((self.totals.forward_s + self.totals.backward_s) / fastest)

    def hopeless(self, before: Ints, first: Ints, room: Ints, times: Floats | None = None) -> Flags:
        """Whether no batch within the threshold can have these layers on the workers in front.

        Stages on r workers take at least (M / r - 1) times their pass of a phase's steady part, and all of these r add
        up to at most the number of workers in front. If `times` are not known, all layers behind take their passes.
        """
        open_ = np.minimum(first, room)
        workers = np.maximum(open_, 1)
        least = [np.maximum(0.0, (self.minibatches / workers - 1) * ahead[before]) for ahead in self.ahead_s]
        if times is None:
            return np.asarray((open_ < 1) | (self.work_s[-1] + np.sum(least, axis=0) > self.budget_s))
        longest = [np.maximum(times[:, phase + 1], part) for phase, part in enumerate(least)]
        total = times[:, 0] + self.work_s[before] + np.sum(longest, axis=0) + times[:, -1]
        return np.asarray((open_ < 1) | (total > self.budget_s))

    def _rounds(self, servers: Floats | Ints) -> Floats:
        """Minibatches on the busiest of so many replicas or links."""
        return np.asarray(np.ceil(self.minibatches / servers))

    def _quick(
        self, before: Ints, passes: tuple[Floats, Floats], ring_s: Floats, kinds: tuple[Floats, Floats]
    ) -> Flags:
        (forward, backward), (replicas, speed) = passes, kinds
        added = self.work_s[-1] + np.maximum(0.0, ring_s - backward / speed - self.hidden_s[before][:, None])
        steady = (self._rounds(replicas) - 1) * (forward + backward) / speed
        # Both phases together are no longer than the longest of each.
        return np.asarray(added + steady <= self.budget_s)

    def _near(self, cut: int, hops: Hops) -> Flags:
        sent, returned = self.totals.sent[cut], self.totals.returned[cut]
        both = sent + returned if self.phases == 2 else np.maximum(sent, returned)
        return np.asarray(self.work_s[-1] + (self._rounds(hops.lanes) - 1) * both / hops.bandwidth <= self.budget_s)

    def _depth(self, stages: StagesAtCut, demand: Floats, transfer_s: Floats) -> Floats:
        """The fewest minibatches in flight that sustain the longest steady part, and no more than a replica has."""
        replicas = self.runs.replicas[stages.traffic.run]
        rounds = self._rounds(replicas)
        if self.phases == 2:
            return rounds
        if stages.cut == self.last:
            return np.ones(len(demand))
        longest = self.budget_s - self.work_s[-1]
        away = 2.0 * transfer_s * (self.minibatches - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            covered = demand + np.where(away > 0, away / longest, 0.0)
        return np.asarray(np.minimum(rounds, 1.0 + np.ceil(covered / replicas - ROUNDING)))

    def _times(self, stages: StagesAtCut, before: Floats, hops: Hops) -> Floats:
        replicas, speed = self.runs.replicas[stages.traffic.run], self.runs.speed[stages.traffic.run]
        sent, returned = self.totals.sent[stages.cut], self.totals.returned[stages.cut]
        added = (
            stages.work_s / speed + self._exchange_s(stages) + (sent + returned) / hops.bandwidth + 2.0 * hops.latency_s
        )
        work, ways = [stages.work_s], [np.maximum(sent, returned) / hops.bandwidth]
        if self.phases == 2:
            work = [stages.forward_s, stages.work_s - stages.forward_s]
            ways = [sent / hops.bandwidth, returned / hops.bandwidth]
        bounds = [
            np.maximum((self._rounds(replicas) - 1) * mine / speed, (self._rounds(hops.lanes) - 1) * way)
            for mine, way in zip(work, ways, strict=True)
        ]
        last_pass = (stages.work_s - stages.forward_s) / speed
        bounds.append(np.maximum(0.0, stages.ring_s - last_pass - self.hidden_s[stages.before]))
        longest = np.maximum(before[:, 1:], np.stack(bounds, axis=1))
        return np.concatenate([before[:, :1] + added[:, None], longest], axis=1)

    def _exchange_s(self, stages: StagesAtCut) -> Floats:
        """The charge of stages for exchanging the gradients of weights that they share with others."""
        count = len(self.document.cluster.devices)
        link, charged = self.document.network.among(list(range(count))), np.zeros(len(stages.before))
        for size in self.totals.exchanged(stages.cut, stages.before):
            charged += np.where(size > 0, size / link.allreduce + count * link.latency_s, 0.0)
        return charged

    def _in_time(self, stages: StagesAtCut, times: Floats) -> Flags:
        return np.asarray(times.sum(axis=1) + self.work_s[stages.before] <= self.budget_s)

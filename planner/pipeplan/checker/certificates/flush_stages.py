"""The stages of pipelines whose batch stays within a threshold, for schedules with a flush.

The time of a batch is the longest of several paths (docs/cost-model.md, "Flush schedules"). A state has two numbers:
V1 is the longest path that begins at its first stage, and V2 is a lower bound on the batch. docs/proof.md states and
proves the rules.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker import formulas
from pipeplan.checker.certificates.shared_loads import Pairs
from pipeplan.checker.certificates.stages import StagesAtCut, StageSpace
from pipeplan.checker.document import GPIPE, ZERO_BUBBLE
from pipeplan.checker.model import Flags, Floats

Ints = NDArray[np.intp]


class FlushSpace(StageSpace):
    """All stages of the pipelines of one space of plans; `threshold` is the longest batch, in seconds."""

    @property
    def parts(self) -> int:
        """2, for V1 and V2."""
        return 2

    @property
    def holds_all(self) -> bool:
        """Whether a replica always holds all of its minibatches, as under GPipe."""
        return self.document.schedule == GPIPE

    @property
    def splits(self) -> bool:
        """Whether gradients of weights may fill the time in which the pipeline drains."""
        return self.document.schedule == ZERO_BUBBLE

    @property
    def covers(self) -> bool:
        """Whether depths depend on the later stages."""
        return self.document.options.memory and not self.holds_all

    @cached_property
    def minibatches(self) -> int:
        """Minibatches of a batch, in the copy with the most."""
        return self.document.share(self.copies)

    @cached_property
    def fastest(self) -> float:
        """The speed of the fastest worker."""
        return max(device.speed for device in self.cluster.devices)

    @cached_property
    def ahead_s(self) -> Floats:
        """For each cut: a lower bound on the time that the layers inside add to V1."""
        totals = self.totals
        passes = totals.forward_s if self.splits else totals.forward_s + totals.backward_s - totals.update_s
        return np.asarray(passes / self.fastest)

    def hopeless(self, before: Ints, first: Ints, room: Ints, times: Floats | None = None) -> Flags:
        """Whether these layers on the workers in front always make the batch longer than the threshold.

        A stage on r workers takes at least M / r passes. The sum of r over the stages is at most the number of workers
        in front.
        """
        open_ = np.minimum(first, room)
        work = (self.totals.forward_s[before] + self.totals.backward_s[before]) / self.fastest
        lost = (open_ < 1) | (self.minibatches * work > self.threshold * np.maximum(open_, 1))
        return np.asarray(lost if times is None else lost | (times[:, 1] > self.threshold))

    def _rounds(self, servers: Floats | Ints) -> Floats:
        """Minibatches on the busiest of this number of replicas or links."""
        return np.asarray(np.ceil(self.minibatches / servers))

    def _quick(
        self, before: Ints, passes: tuple[Floats, Floats], ring_s: Floats, kinds: tuple[Floats, Floats]
    ) -> Flags:
        (forward, backward), (replicas, speed) = passes, kinds
        return np.asarray(self._rounds(replicas) * (forward + backward) / speed <= self.threshold)

    def _near(self, cut: int, pairs: Pairs) -> Flags:
        return np.asarray(self._messages_s(cut, pairs) <= self.threshold)

    def _messages_s(self, cut: int, pairs: Pairs) -> Floats:
        """Seconds for which a boundary is busy, in the busier direction; 0 if cards are charged instead."""
        busy = self._rounds(pairs.lanes) * self.totals.busier[cut] / pairs.bandwidth
        return np.asarray(busy * (not self.document.options.contention))

    def _depth(self, stages: StagesAtCut, demand: Floats, transfer_s: Floats) -> Floats:
        """The fewest minibatches in flight: enough for the later stages, and no more than a replica has."""
        replicas = self.runs.replicas[stages.traffic.run]
        if stages.cut == self.last and not self.holds_all:
            return np.ones(len(demand))
        return np.asarray(formulas.flush_depth(demand, self.minibatches, replicas, everything=self.holds_all))

    def _times(self, stages: StagesAtCut, before: Floats, pairs: Pairs) -> Floats:
        run, cut = stages.traffic.run, stages.cut
        speed = self.runs.speed[run]
        both = (stages.work_s - stages.step_s) / speed
        forward = stages.forward_s / speed
        backward, mine = both - forward, forward if self.splits else both
        own = self._rounds(self.runs.replicas[run]) * both
        trip = (self.totals.sent[cut] + self.totals.returned[cut]) / pairs.bandwidth + 2.0 * pairs.latency_s
        path = np.maximum(own - backward / 2 * self.splits, mine + trip / (1 + self.splits) + before[:, 0])
        messages = self._messages_s(cut, pairs)
        if messages.any():
            path, own = (np.maximum(one, np.where(messages > 0, mine + messages, 0.0)) for one in (path, own))
        delayed = np.where(stages.before == 0, path, 0.0) if self.splits else path
        begun = self._wait_s(stages, backward) + np.maximum(own, delayed)
        return np.stack([path, np.maximum.reduce([before[:, 1], begun, path + self.ahead_s[stages.before]])], axis=1)

    def _wait_s(self, stages: StagesAtCut, backward: Floats) -> Floats:
        """Shortest time from the last backward pass of stages to the end of their updates."""
        run = stages.traffic.run
        group = self.group_s(run, self.totals.weights(stages.cut, stages.before))
        exchanged = self.totals.exchanged(stages.cut, stages.before)
        shared = sum((formulas.shared_weight_s(self.document, size) for size in exchanged), np.zeros(len(run)))
        step = stages.step_s / self.runs.speed[run]
        return np.asarray(formulas.update_wait_s(self.document, self.model, group, backward, shared, step))

    def _in_time(self, stages: StagesAtCut, times: Floats) -> Flags:
        return np.asarray(times[:, 1] <= self.threshold)

"""The formulas of docs/cost-model.md once more, for the oracle: on bit masks of layers and runs of workers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from brute_machines import Instance, Machines

FLUSHING = ("gpipe", "1f1b-flush", "zb-h1")
ACCUMULATING = ("2bw", *FLUSHING)


class Stage(NamedTuple):
    """One stage with its figures, per minibatch."""

    before: int
    after: int
    start: int
    end: int
    recompute: bool
    forward: float
    """Seconds of a pass on its slowest worker."""
    backward: float
    time: float
    """Seconds that it needs in the steady state, all replicas together."""
    group: float
    """Seconds of one all-reduce among its replicas."""
    weights: float
    constant: float
    """Bytes of one worker whatever is in flight, without versions of the weights."""
    growing: float
    """Bytes for each minibatch in flight, without a version of the weights."""
    memory: float
    """Of its smallest worker."""
    step: float = 0.0
    """The optimiser's part of `backward`."""

    @property
    def replicas(self) -> int:
        return self.end - self.start

    @property
    def work(self) -> float:
        return self.forward + self.backward


class Link(NamedTuple):
    """What joins two stages: seconds that a message keeps it busy, there and back, latency, and how many at once."""

    there: float
    back: float
    latency: float
    lanes: int

    @property
    def busy(self) -> float:
        """Seconds per minibatch in the busier direction."""
        return max(self.there, self.back) / self.lanes

    @property
    def passing(self) -> float:
        """One transfer."""
        return max(self.there, self.back) + self.latency


Chain = tuple[Stage, ...]


def join(a: float, b: float, overlap: float) -> float:
    """Two activities, of which the shorter hides behind the longer as far as they overlap."""
    return max(a, b) + (1 - overlap) * min(a, b)


def allreduce(members: int, size: float, bandwidth: float, latency: float) -> float:
    """Seconds of a ring all-reduce."""
    return 2 * (members - 1) / members * size / bandwidth + 2 * (members - 1) * latency


def cuts(instance: Instance) -> list[int]:
    """Masks of layers that may lie before a cut: with all that they read from, and no group split."""
    groups = [*instance.together, *instance.joined]
    groups += [layers for layers, _ in instance.tied if instance.kind not in FLUSHING]
    groups += [(source, *targets) for source, targets, _, _ in instance.tensors if source in instance.no_cut_after]
    needs = [(source, target) for source, targets, _, _ in instance.tensors for target in targets]
    masks = [sum(1 << layer for layer in set(group)) for group in groups]
    return [
        mask
        for mask in range(1 << len(instance.layers))
        if all(mask >> source & 1 or not mask >> target & 1 for source, target in needs)
        and all(mask & group in (0, group) for group in masks)
    ]


class Costs:
    """The formulas for one of `copies` equal pipelines.

    `place` has the workers that the first may be on, and the distance of the next copy's.

    They come in terms of one number: in the steady state the step time T of one copy, of which more never takes more
    memory; with a flush the time of a batch, which depths do not depend on.
    """

    def __init__(
        self,
        instance: Instance,
        copies: int,
        machines: Machines | None = None,
        place: tuple[set[int], int] | None = None,
    ) -> None:
        self.instance = instance
        self.machines = machines = machines or Machines(instance)
        self.copies = copies
        self.training = not instance.inference
        self.flushes = instance.kind in FLUSHING
        self.everything = (1 << len(instance.layers)) - 1
        self.cuts = cuts(instance)
        self.crossing_bytes = {cut: self._crossing_bytes(cut) for cut in self.cuts}
        self._stages: dict[tuple[int, int, int, int, bool], Stage] = {}
        self._links: dict[tuple[int, int, int, int, int], Link] = {}
        self.least = {cut: sum(self._times(0, cut)) / max(machines.speeds) for cut in self.cuts}
        """Seconds of computing before each cut, on the fastest worker."""
        self.size = place[1] if place else machines.workers // copies
        """From a worker of one copy to that of the next."""
        self.update = instance.accumulate if instance.kind in ACCUMULATING and instance.accumulate else copies
        """Minibatches of all copies for each all-reduce among them."""
        self.share = self.update // copies if instance.kind == "2bw" else math.ceil(self.update / copies)
        """M', minibatches of one copy for each update."""
        weights = sum(layer["w"] for layer in instance.layers)
        link = machines.rate(self._everywhere(place[0] if place else range(self.size)))
        self.among = self.exchanged(copies, weights, link) if self.training and copies > 1 else 0.0

    def _everywhere(self, workers: Iterable[int]) -> list[int]:
        """Workers of one copy, in all copies."""
        return [copy * self.size + worker for worker in workers for copy in range(self.copies)]

    def exchanged(self, members: int, weights: float, rate: tuple[float, float, float]) -> float:
        """Seconds in which replicas have the mean of their gradients, or new weights where each updates a part."""
        time = allreduce(members, weights, rate[0], rate[2])
        if self.instance.divided:
            time += (members - 1) * (weights / members / rate[0] + rate[2])
        return time

    def _members(self, before: int, after: int) -> list[dict[str, float]]:
        return [layer for index, layer in enumerate(self.instance.layers) if (after & ~before) >> index & 1]

    def _times(self, before: int, after: int) -> tuple[float, float]:
        """Seconds of a forward and a backward pass on a worker of speed 1."""
        mine = self._members(before, after)
        if not self.training:
            return sum(layer["f"] for layer in mine), 0.0
        often = self.instance.accumulate if self.instance.kind in ACCUMULATING else None
        behind = sum(layer["b"] + layer.get("t", 0.0) / (often or 1) for layer in mine)
        return sum(layer["f"] for layer in mine), behind

    def _own(self, before: int, after: int) -> tuple[float, float]:
        """Seconds of the executor's own work in a forward and a backward pass, which each bear half, at speed 1."""
        for_pass, for_message, for_byte, for_version = self.instance.executor
        directions = 2 if self.training else 1
        total = directions * for_pass
        if before == 0 or after == self.everything:
            total += self.instance.sample
        if self.training:
            total += self.instance.step / ((self.instance.kind in ACCUMULATING and self.instance.accumulate) or 1)
        for cut in (before, after):
            if cut not in (0, self.everything):
                total += directions * for_message + for_byte * sum(self.crossing_bytes[cut])
        if self.training and not self.flushes and after != self.everything:
            each = self.instance.accumulate if self.instance.kind == "2bw" else 1
            total += for_version * sum(layer["w"] for layer in self._members(before, after)) / (each or 1)
        return (total / 2, total / 2) if self.training else (total, 0.0)

    def _crossing_bytes(self, cut: int) -> tuple[float, float]:
        """Bytes across a cut, forward and backward, each tensor once."""
        over = [t for t in self.instance.tensors if cut >> t[0] & 1 and any(not cut >> c & 1 for c in t[1])]
        return sum(t[2] for t in over), sum(t[3] for t in over) if self.training else 0.0

    def crossing(self, cut: int) -> tuple[float, float]:
        """Bytes of one minibatch across a cut, forward and backward."""
        return self.crossing_bytes[cut]

    def stage(self, before: int, after: int, start: int, end: int, recompute: bool) -> Stage:
        """The figures of the layers between two cuts on the workers `start` … `end` - 1."""
        key = (before, after, start, end, recompute)
        if key not in self._stages:
            self._stages[key] = self._stage(*key)
        return self._stages[key]

    def _stage(self, before: int, after: int, start: int, end: int, recompute: bool) -> Stage:
        replicas, kind = end - start, self.instance.kind
        weights = sum(layer["w"] for layer in self._members(before, after)) + self._copies(before, after)
        speed = min(self.machines.speeds[start:end])
        forward, backward = (time / speed for time in self._times(before, after))
        backward += forward if recompute else 0.0
        own = [time / speed for time in self._own(before, after)]
        forward, backward = forward + own[0], backward + own[1]
        group = 0.0
        if self.training and replicas > 1:
            group = self.exchanged(replicas, weights, self.machines.rate(range(start, end)))
        if self.flushes and replicas * self.copies > 1:
            everyone = self._everywhere(range(start, end))
            group = self.exchanged(len(everyone), weights, self.machines.rate(everyone))
        often = self.instance.accumulate or 1
        steps = sum(layer.get("t", 0.0) for layer in self._members(before, after)) / speed / often
        each = 0.0 if self.flushes else group / (max(1, self.share) if kind == "2bw" else replicas)
        return Stage(
            *(before, after, start, end, recompute, forward, backward),
            join((forward + backward) / replicas, each, self.instance.overlap),
            group,
            weights,
            *self._bytes(before, after, weights, recompute, replicas * self.copies),
            min(self.machines.memories[start:end]),
            steps,
        )

    def _bytes(self, before: int, after: int, weights: float, recompute: bool, replicas: int) -> tuple[float, float]:
        """Bytes once, and for each minibatch in flight, but for the versions of the weights."""
        mine = self._members(before, after)
        saved, buffers = (sum(layer[key] for layer in mine) for key in ("s", "u"))
        saved += saved * self.instance.kept
        received, sent = self.crossing_bytes[before], self.crossing_bytes[after]
        constant = buffers + sum(received) + sum(sent)
        if not self.training:
            return constant + weights, 0.0
        # Only one layer runs at a time.
        constant += max(layer.get("x", 0.0) for layer in mine)
        state = self.instance.state / (replicas if self.instance.divided else 1)
        constant += weights * (1 + state) + (weights if replicas > 1 else 0.0)
        if recompute:
            return constant + saved + sent[0], received[0]
        return constant, saved + received[0] + sent[0]

    def _copies(self, before: int, after: int) -> float:
        """Bytes of shared weights that these layers read and none of them has."""
        mine = after & ~before
        return sum(
            size
            for layers, size in self.instance.tied
            if not mine >> layers[0] & 1 and any(mine >> i & 1 for i in layers)
        )

    def exchange(self, stage: Stage) -> float:
        """Seconds that a stage pays at an update for the weights that it shares with others."""
        mine, everyone = stage.after & ~stage.before, range(self.machines.workers)
        bandwidth, _, latency = self.machines.rate(everyone)
        held = [(size, sum(mine >> layer & 1 for layer in layers), len(layers)) for layers, size in self.instance.tied]
        return sum(size / bandwidth + len(everyone) * latency for size, here, every in held if 0 < here < every)

    def link(self, stage: Stage, following: Stage) -> Link:
        """What joins two stages."""
        key = (stage.after, stage.start, stage.end, following.start, following.end)
        if key not in self._links:
            _, bandwidth, latency = self.machines.rate(
                [*range(stage.start, stage.end), *range(following.start, following.end)]
            )
            there, back = (size / bandwidth for size in self.crossing_bytes[stage.after])
            lanes = min(stage.replicas, following.replicas) if self.instance.boundary == "parallel" else 1
            self._links[key] = Link(there, back, latency, lanes)
        return self._links[key]

    def _joints(self, chain: Chain) -> list[Link]:
        return [self.link(*pair) for pair in itertools.pairwise(chain)]

    def floor(self, chain: Chain) -> float:
        """T, or the time of a batch, by these stages and what joins them, as if memory had no end."""
        if self.flushes:
            return self._batch(chain)
        return max([stage.time for stage in chain] + [link.busy for link in self._joints(chain)])

    def _batch(self, chain: Chain) -> float:
        """Seconds from one update to the next; at least that where the first stages are missing.

        A batch begins at a stage when its all-reduce is done. It reaches a resource behind when one minibatch has come
        there and, backward, will have gone back; that resource then serves all its minibatches.
        """
        missing = chain[0].before
        early = sum(self._times(0, missing)) - self._steps(0, missing)
        if self.instance.kind == "zb-h1":
            early = self._times(0, missing)[0]
        paths = []
        for begin, first in enumerate(chain):
            way = early / max(self.machines.speeds) if begin == 0 else 0.0
            wait = 0.0 if begin == 0 and missing else self._wait(first)
            for place in range(begin, len(chain)):
                if self.instance.kind == "zb-h1" and begin and place > begin:
                    break
                before = chain[place].before > 0 if begin == 0 and missing else place > begin
                tail = (
                    (chain[place].backward - chain[place].step) / 2 if self.instance.kind == "zb-h1" and before else 0.0
                )
                paths += [wait + way + time for time in self._resources(chain, place, tail)]
                way += self._passing(chain[place])
                if place + 1 < len(chain):
                    link = self.link(*chain[place : place + 2])
                    trip = link.there + link.back + 2 * link.latency
                    way += trip / 2 if self.instance.kind == "zb-h1" else trip
        if missing and self.instance.kind != "zb-h1":
            paths.append(self._wait(chain[0]) + max(self._resources(chain, 0)))
        return max(paths)

    def _resources(self, chain: Chain, place: int, tail: float = 0.0) -> list[float]:
        """How long a stage has to do for a batch, less a `tail` that fits in while the stages before it drain, and the
        boundary behind it after the stage's first pass."""
        stage = chain[place]
        found = [math.ceil(self.share / stage.replicas) * (stage.work - stage.step) - tail]
        if place + 1 < len(chain) and not self.instance.contention:
            link = self.link(*chain[place : place + 2])
            found.append(self._passing(stage) + math.ceil(self.share / link.lanes) * max(link.there, link.back))
        return found

    def _passing(self, stage: Stage) -> float:
        """How long a stage delays those behind it, before the first minibatch and after the last."""
        return stage.forward if self.instance.kind == "zb-h1" else stage.work - stage.step

    def _wait(self, stage: Stage) -> float:
        """From a stage's last backward pass to the end of its update, at least."""
        shared = self.exchange(stage)
        late = self.instance.divided or any(
            0 < sum(cut >> layer & 1 for layer in layers) < len(layers)
            for layers, size in self.instance.tied
            for cut in self.cuts
            if size
        )
        hidden = 0.0 if late else self.instance.overlap
        exposed = stage.group - hidden * min(stage.group, stage.backward - stage.step)
        return exposed + 2 * shared + stage.step * (self.instance.accumulate or 1)

    def _steps(self, before: int, after: int) -> float:
        """Seconds of the optimiser for one minibatch on a worker of speed 1."""
        return sum(layer.get("t", 0.0) for layer in self._members(before, after)) / (self.instance.accumulate or 1)

    def total(self, chain: Chain, number: float) -> float:
        """Seconds per minibatch of all copies, with T or the time of a batch."""
        if not self.flushes:
            return join(number / self.copies, self.among / self.update, self.instance.overlap)
        return number / self.update

    def most(self, chain: Chain, step_time: float) -> float:
        """A T or time of a batch with which these stages are no faster than `step_time`."""
        return step_time * (self.update if self.flushes else self.copies)

    def longest(self, chain: Chain) -> float:
        """A T beyond which no depth falls any more; with a flush none ever does."""
        if self.flushes:
            return self.floor(chain)
        passing = 2 * self.copies * sum(link.passing for link in self._joints(chain))
        return self.floor(chain) + passing + self.copies * (self.among + sum(stage.group for stage in chain))

    def fits(self, chain: Chain, number: float, whole: bool = True) -> bool:
        """Whether memory suffices at the depths that T or A needs; the first stages may be missing."""
        if math.isinf(self.instance.memory) and self.instance.kind != "2bw":
            return True
        depths = self.depths(chain, number)
        if depths is None:
            return False
        counts = self.versions(chain, depths) if whole else self._least_versions(chain, depths)
        return all(
            stage.constant + depth * stage.growing + (count + self._kept(count)) * stage.weights <= stage.memory
            for stage, depth, count in zip(chain, depths, counts, strict=True)
        )

    def _kept(self, versions: int) -> int:
        """Steps of the optimiser that a stage keeps to correct its updates."""
        return versions - 1 if self.instance.corrected else 0

    def depths(self, chain: Chain, number: float) -> list[int] | None:
        """Minibatches in flight at every stage; None where the schedule does not allow as many."""
        kind = self.instance.kind
        if kind == "inference":
            return [1] * len(chain)
        if kind == "gpipe":
            return [math.ceil(self.share / stage.replicas) for stage in chain]
        found: list[int] = []
        demanded, following = 0.0, None
        for stage in reversed(chain):
            depth, wait = 1, 0.0 if self.flushes else self.wait(stage, number)
            if following is not None and self.flushes:
                needed = math.ceil(demanded / stage.replicas - 1e-9)
                depth = min(math.ceil(self.share / stage.replicas), 1 + needed)
            elif following is not None:
                away = 2 * self.link(stage, following).passing / number
                depth = 1 + math.ceil((demanded + wait + away) / stage.replicas - 1e-9)
            if kind == "2bw" and not self._in_time(stage, depth, number):
                return None
            found.append(depth)
            demanded, following = depth * stage.replicas + wait, stage
        return found[::-1]

    def wait(self, stage: Stage, step_time: float) -> float:
        """Minibatches that go by while the replicas wait for the last of their group and its all-reduce."""
        if self.instance.kind in ACCUMULATING:
            return 0.0
        return stage.replicas - 1 / self.copies if self.copies > 1 else max(0.0, stage.group / step_time - 1)

    def _in_time(self, stage: Stage, depth: int, step_time: float) -> bool:
        """Whether an update of 2BW is there before the first forward pass that uses it."""
        late = max(0.0, (stage.group + self.among) / step_time - 1 / self.copies)
        return depth * stage.replicas + late <= self.share * (1 + 1e-12)

    def versions(self, chain: Chain, depths: list[int]) -> list[int]:
        """Versions of the weights at every stage."""
        kind = self.instance.kind
        if kind == "inference":
            return [0] * len(chain)
        if kind in ACCUMULATING:
            return [2 if kind == "2bw" else 1] * len(chain)
        lags = [self.lag(stage) for stage in chain]
        if kind == "1f1b-stashing":
            return [depth + lag for depth, lag in zip(depths, lags, strict=True)]
        first = chain[0].replicas * self.copies
        old = (depths[0] + lags[0]) * first
        counts = [stage.replicas * self.copies for stage in chain]
        return [1 + math.ceil((old - math.gcd(first, count)) / count) for count in counts]

    def lag(self, stage: Stage) -> int:
        """By how many updates a stage runs late."""
        alone = stage.before == 0 and stage.after == self.everything
        return int(not alone and stage.replicas * self.copies > 1)

    def _least_versions(self, chain: Chain, depths: list[int]) -> list[int]:
        """At least so many are kept, whatever stages come before."""
        if self.instance.kind == "vertical-sync":
            return [1] * len(chain)
        if self.instance.kind == "1f1b-stashing":
            return depths
        return self.versions(chain, depths)

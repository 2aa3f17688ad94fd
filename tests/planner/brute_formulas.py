"""The formulas of docs/cost-model.md once more, for the oracle: on bit masks of layers and runs of workers."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Instance:
    """A small problem. Layers are dictionaries with f, b, w, s, u (forward, backward, weights, saved, buffers)."""

    layers: list[dict[str, float]]
    tensors: list[tuple[int, tuple[int, ...], float, float]]
    levels: list[tuple[int, float, float]]
    """count, bandwidth, latency of each level, innermost first."""
    memory: float = math.inf
    overlap: float = 1.0
    state: float = 1.0
    inference: bool = False
    together: tuple[tuple[int, ...], ...] = ()
    """Of the profile."""
    stages: int | None = None
    max_replicas: int | None = None
    max_stages: int | None = None
    max_workers: int | None = None
    pins: tuple[tuple[int, int], ...] = ()
    """Layer, and the stage that it must be in, from 1."""
    joined: tuple[tuple[int, ...], ...] = ()
    """Layers that the user wants in one stage."""
    no_cut_after: tuple[int, ...] = ()
    recompute: bool = False
    boundary: str = "single"
    schedule: str = "1f1b-stashing"
    accumulate: int | None = None
    allow_copies: bool = True


class Stage(NamedTuple):
    """One stage with its figures, per minibatch."""

    before: int
    after: int
    start: int
    end: int
    recompute: bool
    time: float
    group: float
    """Seconds of one all-reduce among its replicas."""
    constant: float
    """Bytes of one worker whatever is in flight."""
    growing: float
    """Bytes for each minibatch in flight."""
    memory: float
    """Of its smallest worker."""

    @property
    def replicas(self) -> int:
        return self.end - self.start


def join(a: float, b: float, overlap: float) -> float:
    """Two activities, of which the shorter hides behind the longer as far as they overlap."""
    return max(a, b) + (1 - overlap) * min(a, b)


def sizes(instance: Instance) -> list[int]:
    """Workers in one component of each level, a single worker first."""
    found = [1]
    for count, *_ in instance.levels:
        found.append(found[-1] * count)
    return found


def cuts(instance: Instance) -> list[int]:
    """Masks of layers that may lie before a cut: with all that they read from, and no group split."""
    groups = [*instance.together, *instance.joined]
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
    """The formulas for one of `copies` equal pipelines."""

    def __init__(self, instance: Instance, copies: int) -> None:
        self.instance = instance
        self.copies = copies
        self.training = not instance.inference
        self.spans = sizes(instance)
        self.everything = (1 << len(instance.layers)) - 1
        self.cuts = cuts(instance)
        self._crossing = {cut: self._crossing_bytes(cut) for cut in self.cuts}
        self._stages: dict[tuple[int, int, int, int, bool], Stage] = {}
        self._links: dict[tuple[int, int, int, int, int], tuple[float, float]] = {}
        self.least = {cut: self._work(self._members(0, cut), False) for cut in self.cuts}
        """Seconds of computing before each cut."""
        self.group_size = (instance.accumulate or 0) / copies
        """Minibatches of one copy per update, 0 where every stage has its own number."""

    def _members(self, before: int, after: int) -> list[dict[str, float]]:
        return [layer for index, layer in enumerate(self.instance.layers) if (after & ~before) >> index & 1]

    def _work(self, layers: list[dict[str, float]], recompute: bool) -> float:
        """Seconds of computing for one minibatch on one worker of speed 1."""
        forward = sum(layer["f"] for layer in layers)
        if not self.training:
            return forward
        return forward * (2 if recompute else 1) + sum(layer["b"] for layer in layers)

    def _crossing_bytes(self, cut: int) -> tuple[float, float]:
        """Bytes across a cut, forward and backward, each tensor once."""
        over = [t for t in self.instance.tensors if cut >> t[0] & 1 and any(not cut >> c & 1 for c in t[1])]
        return sum(t[2] for t in over), sum(t[3] for t in over) if self.training else 0.0

    def _rate(self, first: int, last: int) -> tuple[float, float]:
        """Bandwidth and latency of the smallest component that holds two workers."""
        level = next(k for k, size in enumerate(self.spans) if first // size == last // size)
        passed = [(bandwidth, latency) for count, bandwidth, latency in self.instance.levels[:level] if count > 1]
        if not passed:
            return math.inf, 0.0
        return min(bandwidth for bandwidth, _ in passed), max(latency for _, latency in passed)

    def total(self, inner: float) -> float:
        """The pace of all copies together: one copy's, and the whole model all-reduced among them."""
        among = 0.0
        if self.training and self.copies > 1:
            weights = sum(layer["w"] for layer in self.instance.layers)
            whole = allreduce(self.copies, weights, *self._rate(0, self.spans[-1] - 1))
            among = whole / (self.instance.accumulate or self.copies)
        return join(inner / self.copies, among, self.instance.overlap)

    def stage(self, before: int, after: int, start: int, end: int, recompute: bool) -> Stage:
        """The figures of the layers between two cuts on the workers `start` … `end` - 1."""
        key = (before, after, start, end, recompute)
        if key not in self._stages:
            self._stages[key] = self._stage(*key)
        return self._stages[key]

    def _stage(self, before: int, after: int, start: int, end: int, recompute: bool) -> Stage:
        mine, replicas = self._members(before, after), end - start
        weights = sum(layer["w"] for layer in mine)
        group = 0.0
        if self.training and replicas > 1:
            group = allreduce(replicas, weights, *self._rate(start, end - 1))
        work = self._work(mine, recompute) / replicas
        time = join(work, group / (self.group_size or replicas), self.instance.overlap)
        constant, growing = self._bytes(before, after, mine, recompute)
        if self.training:
            constant += self._versions(weights, replicas * self.copies > 1, (before, after) == (0, self.everything))
            growing += weights if self.instance.schedule == "1f1b-stashing" else 0.0
        return Stage(before, after, start, end, recompute, time, group, constant, growing, self.instance.memory)

    def _bytes(self, before: int, after: int, mine: list[dict[str, float]], recompute: bool) -> tuple[float, float]:
        """Bytes once and for each minibatch in flight, but for the versions of the weights and what replicas need."""
        weights, saved, buffers = (sum(layer[key] for layer in mine) for key in ("w", "s", "u"))
        received, sent = self._crossing[before], self._crossing[after]
        constant = buffers + sum(received) + sum(sent)
        if not self.training:
            return constant + weights, 0.0
        constant += weights * (1 + self.instance.state)
        if recompute:
            return constant + saved + sent[0], received[0]
        return constant, saved + received[0] + sent[0]

    def _versions(self, weights: float, replicated: bool, alone: bool) -> float:
        """Bytes of weights that do not grow with the depth, and of what an all-reduce needs."""
        buckets = weights if replicated else 0.0
        if self.instance.schedule == "2bw":
            return 2 * weights + buckets
        return buckets + (weights if replicated and not alone else 0.0)

    def link(self, stage: Stage, following: Stage) -> tuple[float, float]:
        """Seconds that a minibatch keeps a boundary busy, and that it takes to pass it."""
        key = (stage.after, stage.start, stage.end, following.start, following.end)
        if key not in self._links:
            busier = max(self._crossing[stage.after])
            bandwidth, latency = self._rate(stage.start, following.end - 1)
            links = min(stage.replicas, following.replicas) if self.instance.boundary == "parallel" else 1
            self._links[key] = busier / (bandwidth * links), busier / bandwidth + latency
        return self._links[key]

    def _passing(self, chain: tuple[Stage, ...]) -> list[tuple[float, float]]:
        return [self.link(*pair) for pair in itertools.pairwise(chain)]

    def floor(self, chain: tuple[Stage, ...]) -> float:
        """The slowest resource of these stages."""
        return max([stage.time for stage in chain] + [busy for busy, _ in self._passing(chain)])

    def longest(self, chain: tuple[Stage, ...]) -> float:
        """A pace beyond which no depth falls any more."""
        passing = sum(time for _, time in self._passing(chain))
        return self.floor(chain) + 2 * self.copies * passing + sum(stage.group for stage in chain)

    def fits(self, chain: tuple[Stage, ...], pace: float, whole: bool = True) -> bool:
        """Whether memory suffices at the depths that a pace of one copy needs; the first stages may be missing."""
        counted = self.training and self.instance.schedule == "2bw"
        if math.isinf(self.instance.memory) and not counted:
            return True
        demanded, following = 0.0, None
        for stage in reversed(chain):
            depth, wait = 1, 0.0
            if self.training:
                wait = self._wait(stage, pace)
            if self.training and following is not None:
                passing = self.link(stage, following)[1]
                depth = 1 + math.ceil((demanded + wait + 2 * passing / pace) / stage.replicas - 1e-9)
            if stage.constant + depth * stage.growing > stage.memory:
                return False
            demanded, following = depth * stage.replicas + wait, stage
            # No update may need a minibatch that has not begun.
            first = whole and stage is chain[0]
            if counted and stage.replicas * (depth if first else 1) > self.group_size:
                return False
        return True

    def _wait(self, stage: Stage, pace: float) -> float:
        """Minibatches that go by while the replicas wait for the last of their group and its all-reduce."""
        if self.instance.schedule == "2bw":
            return 0.0
        return stage.replicas - 1 / self.copies if self.copies > 1 else max(0.0, stage.group / pace - 1)


def allreduce(members: int, size: float, bandwidth: float, latency: float) -> float:
    """Seconds of a ring all-reduce."""
    return 2 * (members - 1) / members * size / bandwidth + 2 * (members - 1) * latency

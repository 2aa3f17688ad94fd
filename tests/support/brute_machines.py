"""The problem as the oracle takes it, and the rates of its machines, worked out from the definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Instance:
    """A small problem. Layers are dictionaries with f, b, w, s, u (forward, backward, weights, saved, buffers), t where
    the optimiser's step takes time, and x where they need memory while they run."""

    layers: list[dict[str, float]]
    tensors: list[tuple[int, tuple[int, ...], float, float]]
    levels: list[tuple[float, ...]]
    """count, bandwidth, latency of each level, innermost first, and the efficiencies of all-reduce and messages."""
    memory: float = math.inf
    overlap: float = 1.0
    state: float = 1.0
    inference: bool = False
    together: tuple[tuple[int, ...], ...] = ()
    """Of the profile."""
    tied: tuple[tuple[tuple[int, ...], float], ...] = ()
    """Layers that share weights, and their bytes, which the first of them has among its own."""
    stages: int | None = None
    max_replicas: int | None = None
    max_stages: int | None = None
    max_workers: int | None = None
    pins: tuple[tuple[int, int], ...] = ()
    """Layer, and the stage that it must be in, from 1."""
    joined: tuple[tuple[int, ...], ...] = ()
    """Layers that the user wants in one stage."""
    no_cut_after: tuple[int, ...] = ()
    grid: bool = False
    """Every stage on as many workers, from the first on, in whole servers unless one is enough; they divide
    `accumulate`."""
    recompute: bool = False
    boundary: str = "single"
    schedule: str = "1f1b-stashing"
    accumulate: int | None = None
    allow_copies: bool = True
    contention: bool = False
    cores: float = 0
    """Of every server, which its workers share; 0: one each."""
    executor: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Seconds of the executor for a pass, a message, a byte of a message, and a byte of a version of the weights."""
    sample: float = 0.0
    """Seconds of the executor for reading samples, at the first and the last stage."""
    step: float = 0.0
    """Seconds of a step of the optimiser, whatever its parameters are."""
    worker: float = 0.0
    """Memory that a worker takes without a stage."""
    share: float = 0.0
    """Of a stage's memory, which the allocator takes in addition."""
    kept: float = 0.0
    """Of what layers save, which the allocator takes in addition to that."""
    corrected: bool = False
    """A step as large as the weights is kept for every version but the newest."""
    divided: bool = False
    """Replicas divide the state of the optimiser, and gather what each has updated: half of an all-reduce more."""
    servers: tuple[Machine, ...] = ()
    """Where servers differ: the innermost level is then one of each, whatever `levels` says of it."""

    @property
    def kind(self) -> str:
        """The schedule, or that there is none."""
        return "inference" if self.inference else self.schedule


@dataclass(frozen=True)
class Machine:
    """One of several servers that differ."""

    workers: int
    speed: float
    memory: float
    """A share of the instance's memory."""
    level: tuple[float, ...]
    """As a level of the instance, but for the count."""
    card: float = 0.0
    """Bandwidth of its link outwards where it is slower than the level's; 0 where not."""


@dataclass(frozen=True)
class Component:
    """Workers `start` … `stop` - 1, and the links that join the components within."""

    start: int
    stop: int
    level: int
    inside: tuple[Component, ...] = ()
    links: tuple[tuple[float, float, float], ...] = ()
    """Bandwidth of an all-reduce, of a message, and latency, one for each component within; none if there is one."""
    members: tuple[Machine, ...] = field(default=(), compare=False)


def sizes(instance: Instance) -> list[int]:
    """Workers in one component of each level, a single worker first, where all are equal."""
    found = [1]
    for count, *_ in instance.levels:
        found.append(found[-1] * int(count))
    return found


def grid_sizes(instance: Instance) -> set[int]:
    """How many workers a uniform grid may have."""
    machines, counted = instance.servers or _equal(instance), 0
    allowed = set(range(1, machines[0].workers + 1))
    for machine in machines:
        counted += machine.workers
        allowed.add(counted)
    return allowed


def components(instance: Instance) -> list[list[Component]]:
    """The components of every level, single workers first."""
    machines = instance.servers or _equal(instance)
    found = [[Component(one, one + 1, 0) for one in range(sum(machine.workers for machine in machines))]]
    found.append([])
    for machine in machines:
        start = found[1][-1].stop if found[1] else 0
        parts = tuple(found[0][start : start + machine.workers])
        link = _link(machine.level, machine.level[0])
        links = (link,) * len(parts) if len(parts) > 1 else ()
        found[1].append(Component(start, start + machine.workers, 1, parts, links, (machine,)))
    for number, (count, *level) in enumerate(instance.levels[1:], start=2):
        below, made = found[-1], []
        for first in range(0, len(below), int(count)):
            parts = tuple(below[first : first + int(count)])
            cards = [part.members[0].card if number == 2 else 0.0 for part in parts]
            links = tuple(_link(level, min(level[0], card or math.inf)) for card in cards) if len(parts) > 1 else ()
            members = tuple(machine for part in parts for machine in part.members)
            made.append(Component(parts[0].start, parts[-1].stop, number, parts, links, members))
        found.append(made)
    return found


def _equal(instance: Instance) -> tuple[Machine, ...]:
    count, *level = instance.levels[0]
    servers = math.prod(int(above[0]) for above in instance.levels[1:])
    return (Machine(int(count), 1.0, 1.0, tuple(level)),) * servers


def _link(level: tuple[float, ...] | list[float], bandwidth: float) -> tuple[float, float, float]:
    _, latency, allreduce, message = (*level, 1.0, 1.0)[:4]
    return bandwidth * allreduce, bandwidth * message, latency


def alike(one: Component, other: Component) -> bool:
    """Whether a pipeline runs in one component as in the other."""
    if one.level == 1:
        mine, its = one.members[0], other.members[0]
        return (mine.workers, mine.speed, mine.memory, mine.level) == (its.workers, its.speed, its.memory, its.level)
    return one.members == other.members


class Machines:
    """Speeds, memories and rates of all workers."""

    def __init__(self, instance: Instance) -> None:
        self.components = components(instance)
        servers = instance.servers or _equal(instance)
        self.speeds = [machine.speed for machine in servers for _ in range(machine.workers)]
        self.memories = [
            (instance.memory * machine.memory - instance.worker) / (1 + instance.share)
            for machine in servers
            for _ in range(machine.workers)
        ]
        self.workers = len(self.speeds)
        self.differ = bool(instance.servers)

    def rate(self, workers: Iterable[int]) -> tuple[float, float, float]:
        """Slowest all-reduce and message, longest latency, on the ways of workers up to where they meet."""
        mine, found = set(workers), [(math.inf, math.inf, 0.0)]
        for level in self.components:
            for one in level:
                for part, link in zip(one.inside, one.links, strict=bool(one.links)):
                    found += [link] if mine & set(range(part.start, part.stop)) else []
                if mine <= set(range(one.start, one.stop)):
                    allreduce, message, latency = zip(*found, strict=True)
                    return min(allreduce), min(message), max(latency)
        raise AssertionError("the outermost component holds all workers")

    def subsets(self, first: int, size: int) -> list[set[int]]:
        """The workers of some servers of a component, for any of its servers but none."""
        servers = [range(one.start, one.stop) for one in self.components[1] if first <= one.start < first + size]
        if not self.differ:
            return [set(range(first, first + size))]
        chosen = itertools.product((True, False), repeat=len(servers))
        found = [{w for one, kept in zip(servers, which, strict=True) if kept for w in one} for which in chosen]
        return [one for one in found if one]

    def copies(self) -> list[tuple[int, int, int]]:
        """Where copies of one pipeline can be: first worker, workers of each copy, and how many copies follow."""
        found = [(0, self.workers, 1)]
        for level in self.components[1:]:
            for first, one in enumerate(level):
                if not 1 < one.stop - one.start < self.workers:
                    continue
                for count in range(2, len(level) - first + 1):
                    if not alike(one, level[first + count - 1]):
                        break
                    found.append((one.start, one.stop - one.start, count))
        return list(dict.fromkeys(found))

"""Chooses the pairs and groups of workers to measure, and which of them are measured at the same time.

Torch-free; the result is the same on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pipeplan_launch.plan.planned_links import pack_rounds

SIZES = tuple(2**12 * 4**step for step in range(8))
"""Sizes of a message or an all-reduce, in bytes: 4 KiB to 64 MiB."""

MESSAGE, ALL_PAIRS_AT_ONCE, RING = "message", "together", "ring"
"""Kinds of operations: messages of one pair; messages of all pairs between two components at once; all-reduce of a
group."""


@dataclass(frozen=True)
class BenchmarkSettings:
    """Options of the benchmark."""

    device: str = "cpu"
    """`cpu` or `cuda`."""
    timeout_s: float = 60.0
    """Seconds to wait for a worker when all join, and later for each message."""
    budget_s: float = 45.0
    """Seconds that the measurements should take."""
    facts: Mapping[str, str | int | float] = field(default_factory=dict)
    """Facts about this worker that rank 0 needs for the result."""
    servers: bool = False
    """Whether the servers are measured as well (`servers`)."""
    refusal: str = ""
    """Reason why rank 0 cannot write the result; "" if it can. Reported once all workers are present."""


@dataclass(frozen=True)
class ServerShare:
    """The number of this server among several, which all have the same number of workers."""

    servers: int = 1
    number: int = 0
    """Number of this server, from 0. Rank 0 is on server 0."""


@dataclass(frozen=True)
class TimedOperation:
    """Times of one operation of one pair or group, over sizes."""

    kind: str
    """`MESSAGE`, `ALL_PAIRS_AT_ONCE` or `RING`."""
    level: int
    """Number of the level, from 0; -1 for the measurements from which the levels are found."""
    ranks: tuple[int, ...]
    way: str
    """The transport: `Gloo` or `NCCL`."""
    samples: tuple[tuple[int, float], ...]
    """(bytes, median seconds) for each size."""


@dataclass(frozen=True)
class PairRates:
    """Rates of pairs of workers, from which the levels of the cluster are found."""

    places: tuple[str, ...]
    """The place of every worker: workers with the same text can share memory."""
    pairs: Mapping[tuple[int, int], float]
    """Rates in bytes/s, in each direction, of the pairs that were measured."""


@dataclass(frozen=True)
class OneWay:
    """The rate of one direction between the first workers of two servers, while nothing else is sent."""

    sender: int
    receiver: int
    """Ranks of the two workers."""
    rate: float
    """Bytes/s."""


@dataclass(frozen=True)
class ServerCheck:
    """Measurements of the servers themselves, in addition to the link benchmark."""

    compute_s: tuple[float, ...]
    """By rank: seconds for the same work on every worker, while all workers are busy."""
    one_way: tuple[OneWay, ...]
    clock_s: tuple[float, ...]
    """By server: seconds by which the clock of its first worker is ahead of the clock of rank 0."""


@dataclass(frozen=True)
class MeasuredLinks:
    """The result of the benchmark, at rank 0."""

    found: PairRates
    machines: tuple[str, ...]
    """The machine of every worker. Several places may be on one machine."""
    hosts: tuple[str, ...]
    """The host name of every worker."""
    facts: tuple[Mapping[str, str | int | float], ...]
    """`BenchmarkSettings.facts` of every worker."""
    timed: tuple[TimedOperation, ...]
    """Times of the messages and all-reduces of every level."""
    servers: ServerCheck | None = None
    """Measurements of the servers themselves; None if they were not requested."""


Partition = tuple[tuple[int, ...], ...]
FindLevels = Callable[[PairRates], tuple[Partition, ...]]
"""Function, called at rank 0, that finds the components of every level, innermost first. The last level has one
component with all workers."""
ShowProgress = Callable[[int, int, str], None]
"""Function that shows the progress: (steps done, number of steps, description of the current step)."""


T = TypeVar("T")
Pair = tuple[int, int]

MAX_WORKERS_ALL_PAIRS = 16
"""Largest number of workers for which all pairs are measured."""
MAX_PAIRS_ALONE = 64
"""Largest number of pairs of servers for which each pair is measured alone, because pairs may share a cable."""
MAX_NEIGHBOURS = 3
"""Largest number of pairs whose messages are timed in each component of a level inside a server."""


@dataclass(frozen=True)
class MeasurementJob:
    """Operations that are measured at the same time."""

    kind: str
    """`MESSAGE`, `ALL_PAIRS_AT_ONCE` or `RING`."""
    level: int
    teams: tuple[tuple[int, ...], ...]
    """Pairs that exchange messages, or groups that all-reduce. No worker is in two teams."""


def pairs_inside(places: Sequence[str]) -> list[Pair]:
    """Pairs of workers in one place: all pairs, or if there are many, each worker with the workers 1, 2, 4, … after
    it.
    """
    pairs = []
    for ranks in _by_place(places):
        if len(ranks) <= MAX_WORKERS_ALL_PAIRS:
            pairs += list(itertools.combinations(ranks, 2))
        else:
            steps = [2**power for power in range(len(ranks).bit_length()) if 2**power < len(ranks)]
            pairs += [(one, two) for step in steps for one, two in zip(ranks, ranks[step:], strict=False)]
    return pairs


def pairs_across(places: Sequence[str]) -> list[Pair]:
    """Pairs of workers in two places: all pairs, or if there are many workers, one pair for every two places."""
    pairs: list[Pair] = []
    for number, (one, two) in enumerate(itertools.combinations(_by_place(places), 2)):
        if len(places) <= MAX_WORKERS_ALL_PAIRS:
            pairs += itertools.product(one, two)
        else:
            pairs.append((one[number % len(one)], two[number % len(two)]))
    return [(min(pair), max(pair)) for pair in pairs]


def pair_rounds(places: Sequence[str], machines: Sequence[str]) -> list[list[Pair]]:
    """Rounds of pairs for the first part of the benchmark. Two pairs on one machine never run at the same time, because
    they share its cores.
    """

    def needs(pair: Pair) -> set[Hashable]:
        return {machines[rank] for rank in pair}

    outward = pairs_across(places)
    few = len(outward) <= MAX_PAIRS_ALONE or len(set(places)) ** 2 <= 2 * MAX_PAIRS_ALONE
    return pack_rounds(pairs_inside(places), needs) + pack_rounds(outward, needs, alone=few)


def level_jobs(partitions: Sequence[Partition], machines: Sequence[str]) -> list[MeasurementJob]:
    """Jobs for the second part of the benchmark: each level's messages, by single pairs and all at once, and its
    all-reduces.
    """
    found: list[MeasurementJob] = []
    below: Partition = tuple((rank,) for rank in range(len(machines)))

    def needs(teams: tuple[tuple[int, ...], ...]) -> set[Hashable]:
        return {machines[rank] for team in teams for rank in team}

    for level, partition in enumerate(partitions):
        for kind in (MESSAGE, ALL_PAIRS_AT_ONCE, RING):
            sets = []
            for component in partition:
                parts = [part for part in below if part[0] in component]
                if len(parts) > 1:
                    sets += _sets(kind, component, parts)
            for together in pack_rounds(sets, needs):
                found.append(MeasurementJob(kind, level, tuple(team for teams in together for team in teams)))
        below = partition
    return found


def _sets(kind: str, component: tuple[int, ...], parts: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Sets of teams to measure inside one component. The teams of a set run at the same time."""
    meets = [(one, two) for one, two in itertools.pairwise(parts)]
    single = max(map(len, parts)) == 1
    if len(parts) > 2 and not single:
        meets.append((parts[0], parts[-1]))
    if kind == MESSAGE:
        chosen = meets if not single else _spread(meets, MAX_NEIGHBOURS)
        return [((one[-1], two[0]),) for one, two in chosen]
    if kind == ALL_PAIRS_AT_ONCE and single:
        at_once = tuple((one[0], two[0]) for one, two in zip(parts[::2], parts[1::2], strict=False))
        return [at_once] if len(at_once) > 1 else []
    if kind == ALL_PAIRS_AT_ONCE:
        pairs = [tuple(zip(one, two, strict=False)) for one, two in meets]
        return [pair for pair in pairs if len(pair) > 1]
    groups = [component, *([tuple(part[0] for part in parts)] if not single else [])]
    if single and len(component) > 3:
        groups.append(component[:2])
    return [(group,) for group in groups]


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` items, evenly spread."""
    return list(items) if len(items) <= most else [items[at * (len(items) - 1) // (most - 1)] for at in range(most)]


def _by_place(places: Sequence[str]) -> list[tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]

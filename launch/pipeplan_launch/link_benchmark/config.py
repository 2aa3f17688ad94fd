"""Options and results of the link benchmark. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

KIB, MIB = 2**10, 2**20
SIZES = tuple(4 * KIB * 4**step for step in range(8))
"""Sizes of a message or an all-reduce, in bytes: 4 KiB to 64 MiB."""

MESSAGE, ALL_PAIRS_AT_ONCE, RING = "message", "together", "ring"
"""Kinds of operations: one pair exchanges messages; all pairs between two components do so at once; a group reduces."""


@dataclass(frozen=True)
class BenchmarkSettings:
    """Options of the benchmark."""

    device: str = "cpu"
    """`cpu` or `cuda`."""
    timeout_s: float = 60.0
    """Time to wait for a worker at the rendezvous, and for each message later."""
    budget_s: float = 45.0
    """Time that the measurements should take."""
    facts: Mapping[str, str | int | float] = field(default_factory=dict)
    """Facts about this worker that rank 0 needs for the result."""
    refusal: str = ""
    """Reason why this worker cannot take part; "" if it can. Rank 0 reports it once all workers are present."""


@dataclass(frozen=True)
class ServerShare:
    """The position of this server among several, all with the same number of workers."""

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
class MeasuredLinks:
    """The result of the benchmark, at rank 0."""

    found: PairRates
    machines: tuple[str, ...]
    """The machine of every worker. Several places may be on one machine."""
    facts: tuple[Mapping[str, str | int | float], ...]
    """`BenchmarkSettings.facts` of every worker."""
    timed: tuple[TimedOperation, ...]
    """Times of the messages and all-reduces of every level."""


Partition = tuple[tuple[int, ...], ...]
FindLevels = Callable[[PairRates], tuple[Partition, ...]]
"""Finds the components of every level, innermost first. The last level has one component with all workers. Called at
rank 0."""
ShowProgress = Callable[[int, int, str], None]
"""Shows the progress: (steps done, number of steps, description of the current step)."""

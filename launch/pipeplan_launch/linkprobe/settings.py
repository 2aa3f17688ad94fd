"""What a survey of links is asked, and what it answers. Plain data: no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

KIB, MIB = 2**10, 2**20
SIZES = tuple(4 * KIB * 4**step for step in range(8))
"""Bytes of a message or an all-reduce: 4 KiB to 64 MiB."""

MESSAGE, TOGETHER, RING = "message", "together", "ring"
"""One pair exchanges messages; all pairs of two components do; a group reduces."""


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    device: str = "cpu"
    """`cpu` or `cuda`."""
    timeout_s: float = 60.0
    """For a worker to come, and for whatever is waited for later."""
    budget_s: float = 45.0
    """What measuring should take."""
    facts: Mapping[str, str | int | float] = field(default_factory=dict)
    """What rank 0 should know of this worker."""
    refusal: str = ""
    """Why this worker cannot take part, if it cannot: rank 0 says so when all are there, and nobody waits in vain."""


@dataclass(frozen=True)
class Share:
    """Which of several servers this is, each with as many workers."""

    servers: int = 1
    number: int = 0
    """From 0; rank 0 is on the first."""


@dataclass(frozen=True)
class Timed:
    """Times of one operation over sizes, of one pair or group."""

    kind: str
    level: int
    """Number of the level among those found, from 0; -1 where none had been found yet."""
    ranks: tuple[int, ...]
    way: str
    """What carried it: `shared memory`, `Gloo`, `NCCL`."""
    samples: tuple[tuple[int, float], ...]
    """(bytes, median seconds), by size."""


@dataclass(frozen=True)
class Found:
    """What rank 0 knows when all pairs are measured."""

    places: tuple[str, ...]
    """Where every worker runs: the same text means that they can share memory."""
    pairs: Mapping[tuple[int, int], float]
    """Bytes/s, each way, of the pairs that were measured."""


@dataclass(frozen=True)
class Measured:
    """Everything, at rank 0."""

    found: Found
    machines: tuple[str, ...]
    """The machine of every worker; several places may be on one."""
    facts: tuple[Mapping[str, str | int | float], ...]
    """Of every worker."""
    timed: tuple[Timed, ...]


Partition = tuple[tuple[int, ...], ...]
Levels = Callable[[Found], tuple[Partition, ...]]
"""The components of every level, innermost first; the last has one, of all workers. Called at rank 0."""
Show = Callable[[int, int, str], None]
"""Told (steps done, steps in all, what is being measured)."""

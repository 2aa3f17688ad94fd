"""What the command line says about averaging gradients among the replicas of a stage. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMPRESSION = re.compile(r"bf16|powersgd(?::([1-9]\d{0,3})(?::(\d{1,9}))?)?")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)")
EXACT_UPDATES = 10  # torch advises a tenth of the updates; 2 are its least


@dataclass(frozen=True)
class Compression:
    """How gradients are compressed among all replicas of a stage, by one of torch's own communication hooks."""

    kind: str
    """`bf16` or `powersgd`."""
    rank: int = 1
    """PowerSGD: of the two thin matrices that stand for a parameter's gradient."""
    exact: int = EXACT_UPDATES
    """PowerSGD: so many of the job's first updates are averaged exactly."""


@dataclass(frozen=True)
class Averaging:
    """How the replicas of a stage average their gradients: exactly, unless something is given here."""

    compression: Compression | None = None
    significance: float | None = None
    """Only updates above this share of their weight leave a server; the rest adds up until it is."""


EXACT = Averaging()


def parse_compression(text: str) -> Compression:
    """`bf16`, `powersgd`, `powersgd:RANK` or `powersgd:RANK:EXACT`. Raises ValueError."""
    match = _COMPRESSION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is neither bf16 nor powersgd, powersgd:RANK or powersgd:RANK:EXACT_UPDATES")
    if text == "bf16":
        return Compression("bf16")
    rank, exact = match.groups()
    return Compression("powersgd", int(rank or 1), EXACT_UPDATES if exact is None else int(exact))


def parse_significance(text: str) -> float:
    """A share, written `1%` or `0.01`: at least 0, below 100%. Raises ValueError."""
    match = _PERCENT.fullmatch(text.strip())
    share = -1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= share < 1:
        raise ValueError(f"{text[:40]!r} is not a share from 0% to below 100%, as in 1% or 0.01")
    return share

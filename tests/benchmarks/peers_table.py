"""What a comparison consists of, what it found, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peers_run import Measured, Ours
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One comparison."""

    target: float
    """The ratio to reach."""
    ours: tuple[Ours, ...]
    theirs: tuple[str, ...]
    exact: bool
    """Whether both sides compute the same at every update, and not only at the first."""
    shaped: str | None = None
    """The rate of the link between the workers, if it is not loopback."""

    @property
    def subject(self) -> str:
        """The model."""
        return self.ours[0].subject


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    repeats: int
    warm: int
    updates: int
    """Measured, after the warm ones."""

    @property
    def all(self) -> int:
        """Updates of one run."""
        return self.warm + self.updates


@dataclass(frozen=True)
class Found:
    """The measurements of a row, by contender."""

    runs: Mapping[str, Sequence[Measured]]
    """One a turn."""
    tried: Mapping[str, float]
    """Seconds per update of the peers that were tried once, to choose who takes part."""


def ratios(ours: Sequence[Measured], theirs: Sequence[Measured], warm: int) -> list[float]:
    """The peer's time over ours, by turn."""
    return [peer.update_s(warm) / own.update_s(warm) for own, peer in zip(ours, theirs, strict=True)]


def add(table: Table, name: str, row: Row, found: Found, settings: Settings) -> None:
    """The lines of a row: every contender, ours with its ratio to the fastest peer."""
    warm = settings.warm
    medians = {who: statistics.median(run.update_s(warm) for run in runs) for who, runs in found.runs.items()}
    ours = {one.name for one in row.ours}
    plain = min((who for who in medians.keys() - ours if not who.endswith("+")), key=medians.__getitem__)
    best = min(medians.keys() - ours, key=medians.__getitem__)
    for number, (who, runs) in enumerate(found.runs.items()):
        cells = [f"{medians[who] * 1e3:.0f}", str(len(runs))]
        cells.append(", ".join(f"{memory / 2**20:.0f}" for memory in runs[0].memory_bytes))
        if who in ours:
            cells += [spread(ratios(runs, found.runs[peer], warm)) for peer in (plain, best)]
            cells.insert(-1, f"{row.target:.2f}")
        else:
            cells += ["fastest peer" if who == plain else "", "", "fastest of all" if who == best else ""]
        table.add_row("" if number else name, label(who), *cells)
    for who, time_s in found.tried.items():
        if who not in found.runs:
            table.add_row("", label(f"{who}+"), f"{time_s * 1e3:.0f}", "tried")
    table.add_section()


def spread(found: Sequence[float]) -> str:
    """The median, and from where to where."""
    return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"


def label(contender: str) -> str:
    """As the table has it."""
    plain = contender.removesuffix("+")
    kind, colon, microbatches = plain.partition(":")
    text = "torch DDP" if kind == "ddp" else f"torch {kind}, M = {microbatches}"
    if not colon:
        return contender
    return text + ", allocator set" * contender.endswith("+")

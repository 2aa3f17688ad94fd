"""Blocks of a model that follow each other and are drawn alike: of 32 transformer blocks, one picture tells all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.picture.chains import Chain

FEWEST, LONGEST = 3, 60
"""Times that a block must follow itself, and the most chains in one."""


@dataclass(frozen=True)
class Repeat:
    """Chains `start` … `start + period - 1`, and as many again so often that there are `times` of them."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The chain after the last."""
        return self.start + self.period * self.times


def repeats(chains: Sequence[Chain]) -> list[Repeat]:
    """Runs of like blocks, from the first on, each as long as can be."""
    found = []
    at = 0
    while at < len(chains):
        best = max((_run(chains, at, period) for period in range(1, LONGEST + 1)), key=_covered)
        if best.times >= FEWEST:
            found.append(best)
            at = best.end
        else:
            at += 1
    return found


def _covered(run: Repeat) -> tuple[int, int]:
    """What of two runs is better: what covers more, and then the shorter block."""
    return (run.period * run.times if run.times >= FEWEST else 0, -run.period)


def _run(chains: Sequence[Chain], start: int, period: int) -> Repeat:
    at = start
    while at + period < len(chains) and _alike(chains[at], chains[at + period], period):
        at += 1
    return Repeat(start, period, (at - start) // period + 1)


def _alike(one: Chain, later: Chain, period: int) -> bool:
    """The same operations and weights, reading the same, or what lies as far before."""
    mine = [(layer.op, layer.parameter_bytes) for layer in one.layers]
    theirs = [(layer.op, layer.parameter_bytes) for layer in later.layers]
    return mine == theirs and (
        len(one.reads) == len(later.reads)
        and all(after - before in (0, period) for before, after in zip(one.reads, later.reads, strict=True))
    )

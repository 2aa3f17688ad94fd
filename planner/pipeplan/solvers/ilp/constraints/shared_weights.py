"""Constraint (20) of the integer program: copies of weights that layers in several stages share.

`integer_program` has the notation. For a weight that the blocks l₀, l₁, … share, where l₀ is charged for its bytes, and
for every worker p:

(20) h[t,p] ≥ z[l,p] - z[l₀,p] for l = l₁, …      the stage that starts at p holds the weight, and its blocks lack it
     s[t,p] ≥ z[l,p] - z[l′,p] for l, l′ in turn  it holds some of the blocks, and not all, so it exchanges gradients

Both are charged only, so that in a best solution each is 0 or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipeplan.cost.stage_times import exchange_times
from pipeplan.problem.problem import Problem
from pipeplan.problem.shared_weights import shared_weights
from pipeplan.solvers.ilp.facts.layers import LayerBlocks
from pipeplan.solvers.ilp.milp.linear_program import LinearProgram, Term, Variable, negate_terms

if TYPE_CHECKING:
    Starts = Callable[[int, int], list[Term]]


class SharedCopies:
    """The variables h and s of a program, with (20)."""

    def __init__(self, program: LinearProgram, problem: Problem, layers: LayerBlocks, starts: Starts) -> None:
        """`starts` gives the terms of z[l,p]."""
        self.weights = shared_weights(problem.profile, layers.home) if problem.options.flushes else ()
        self._exchange_s = exchange_times(problem, self.weights)
        self._held: dict[tuple[int, int], Variable] = {}
        self._split: dict[tuple[int, int], Variable] = {}
        for number, weight in enumerate(self.weights):
            first, *others = weight.units
            following = [*others, first]
            for worker in range(problem.cluster.workers):
                held = self._held[number, worker] = program.number(f"h_{number}_{worker}", 0, 1)
                for block in others:
                    terms = [*starts(block, worker), *negate_terms(starts(first, worker))]
                    program.at_most([*terms, (held, -1.0)])
                split = self._split[number, worker] = program.number(f"s_{number}_{worker}", 0, 1)
                for block, other in zip(weight.units, following, strict=True):
                    terms = [*starts(block, worker), *negate_terms(starts(other, worker))]
                    program.at_most([*terms, (split, -1.0)])

    def bytes_at(self, worker: int, factor: float) -> list[Term]:
        """The terms of the bytes that the stage at `worker` holds beside its blocks' parameters, times a factor."""
        return [(self._held[number, worker], weight.bytes * factor) for number, weight in enumerate(self.weights)]

    def exchange(self, workers: Sequence[int], unit_s: float) -> list[Term]:
        """The terms of what all stages are charged for exchanging gradients, in this unit of time."""
        return [
            (self._split[number, worker], time / unit_s)
            for number, time in enumerate(self._exchange_s)
            for worker in workers
        ]

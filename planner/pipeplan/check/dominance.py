"""Decides whether one state of a certificate dominates another. docs/check.md states the lemma and proves it."""

from __future__ import annotations

import numpy as np

from pipeplan.check.model import Flags
from pipeplan.check.rates import Rates


def stands_for(rates: Rates, other: tuple[int, int], state: tuple[int, int]) -> bool:
    """Whether every stage that fits in front of `state` also fits in front of `other`, as far as links decide.

    A state is given as (its first worker, the level that its first stage spans); workers count from 0.
    """
    (first, span), (other_first, other_span) = state, other
    if first == 0:
        return True  # No stage fits in front of the first worker.
    # Every stage in front is joined with this state's first stage at this level or a higher one.
    joined = max(span, rates.level(first - 1, first))
    if other_first < first or other_span > joined:
        return False
    while (apart := rates.level(first, other_first)) > joined:
        # The two lie in different components inside one component of level `apart`. Stages in front of `state` in its
        # component can be moved by the same distance as the state itself, so compare positions inside a component.
        size = rates.spans[apart - 1]
        first, other_first = first % size, other_first % size
        if other_first < first:
            return False
    return True


def replaced(rates: Rates, other: tuple[int, int]) -> Flags:
    """Which states `other` dominates: an array of `stands_for` over first worker and level of the dominated state."""
    workers, levels = range(rates.spans[-1]), range(len(rates.spans))
    return np.array([[stands_for(rates, other, (first, span)) for span in levels] for first in workers])

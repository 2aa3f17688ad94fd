"""When one state of a certificate stands for another. docs/check.md states the lemma and proves it."""

from __future__ import annotations

import numpy as np

from pipeplan.check.model import Flags
from pipeplan.check.rates import Rates


def stands_for(rates: Rates, other: tuple[int, int], mine: tuple[int, int]) -> bool:
    """Whether whatever fits in front of a state, `mine`, also fits in front of the other, as far as links decide.

    A state is given as its first worker and the level that its first stage spans; workers count from 0.
    """
    (first, span), (other_first, other_span) = mine, other
    if first == 0:
        return True  # Nothing fits in front.
    # Any stage in front is joined with this one at this level or a higher one.
    joined = max(span, rates.level(first - 1, first))
    if other_first < first or other_span > joined:
        return False
    while (apart := rates.level(first, other_first)) > joined:
        # In different components inside a component of level `apart`: what lies in front, in the same one, moves along.
        size = rates.spans[apart - 1]
        first, other_first = first % size, other_first % size
        if other_first < first:
            return False
    return True


def replaced(rates: Rates, other: tuple[int, int]) -> Flags:
    """`stands_for` by first worker and level of the state that is replaced, for one that replaces it."""
    workers, levels = range(rates.spans[-1]), range(len(rates.spans))
    return np.array([[stands_for(rates, other, (first, span)) for span in levels] for first in workers])

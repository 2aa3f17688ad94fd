"""Finds the rows that no other row dominates, with as few comparisons as the order of the rows allows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeplan.problem.cuts import Flags, Ints

_FIRST_CHUNK, _LARGEST_CHUNK = 8, 512
_KEPT_PIECE = 256


def undominated_rows(count: int, dominates: Callable[[Ints, Ints], Flags]) -> Ints:
    """The rows 0 … count-1 that no row before them dominates, in increasing order.

    `dominates(some, others)` gives flags of shape (some, others) for two arrays of rows. The order must be such that no
    row is dominated by a later one, unless both dominate each other. Most searches keep few of very many rows, and the
    best come first; so the first chunk is small, and later rows are compared with the kept ones before all else.
    """
    kept: Ints = np.zeros(0, dtype=np.intp)
    begin, size = 0, _FIRST_CHUNK
    while begin < count:
        rows = np.arange(begin, min(begin + size, count))
        for piece in range(0, len(kept), _KEPT_PIECE):
            if not len(rows):
                break
            rows = rows[~dominates(kept[piece : piece + _KEPT_PIECE], rows).any(axis=0)]
        if len(rows) > 1:
            # A row that loses to one that is lost itself also loses to the one that is kept.
            rows = rows[~np.triu(dominates(rows, rows), 1).any(axis=0)]
        kept = np.concatenate([kept, rows])
        begin, size = begin + size, min(2 * size, _LARGEST_CHUNK)
    return kept

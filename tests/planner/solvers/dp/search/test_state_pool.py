"""The pool gives every waiting state once, at its cut, in the order in which the states came."""

from __future__ import annotations

import numpy as np

from pipeplan.solvers.dp.search.states import SearchStates, StatePool


def test_states_wait_for_their_cut_in_order() -> None:
    rng, count, number = np.random.default_rng(5), 100, 0
    pool, expected = StatePool(count), {cut: list[float]() for cut in range(count)}
    for cut in range(count - 1, -1, -1):
        found = pool.take(cut)
        assert (list[float]() if found is None else found.demand.tolist()) == expected[cut]
        for _ in range(min(2, cut)):
            targets = rng.integers(0, cut, size=rng.integers(1, 30))
            demand = np.arange(number, number + len(targets), dtype=float)
            number += len(targets)
            pool.add(targets, SearchStates.of({"first": targets}, demand))
            for target, value in zip(targets.tolist(), demand.tolist(), strict=True):
                expected[target].append(value)
    assert number > 1000

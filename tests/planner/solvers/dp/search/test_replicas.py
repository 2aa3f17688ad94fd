"""The quick test for replicas rules out no stage that is fast enough, and rules out stages that are not."""

from __future__ import annotations

import numpy as np
import pytest

from pipeplan.solvers.dp.search.replicas import allowed_replicas, may_suffice


@pytest.mark.parametrize("accumulate", [None, 8])
@pytest.mark.parametrize("overlap", [0.0, 0.6, 1.0])
def test_the_quick_test_rules_out_only_stages_that_no_number_of_replicas_makes_fast_enough(
    overlap: float, accumulate: int | None
) -> None:
    rng, shape = np.random.default_rng(3), (3, 2000)
    work_s = np.broadcast_to(rng.uniform(0.0, 20.0, shape[1]), shape)
    size, most = rng.uniform(0.0, 10.0, shape[1]), rng.integers(-1, 30, shape)
    bandwidth, latency_s = np.array([[5.0], [1.0], [0.3]]), np.array([[0.0], [0.01], [0.2]])
    stages = work_s, size, bandwidth, latency_s
    least = allowed_replicas(*stages, 1.0, overlap=overlap, accumulate=accumulate).least(np.ones(shape))
    enough = least <= most
    likely = may_suffice(*stages, 1.0, most, overlap=overlap, accumulate=accumulate)
    assert not (enough & ~likely).any()
    assert enough.sum() > 200
    assert likely.sum() < 2 * enough.sum()


def test_a_stage_that_takes_exactly_the_threshold_passes_the_quick_test() -> None:
    work_s, size, rate = np.array([[1.0, 3.0]]), np.zeros(2), np.ones((1, 1))
    most = np.array([[1, 3]])
    assert may_suffice(work_s, size, rate, np.zeros((1, 1)), 1.0, most, overlap=0.0).all()
    assert not may_suffice(work_s, size, rate, np.zeros((1, 1)), 1.0, most - 1, overlap=0.0).any()

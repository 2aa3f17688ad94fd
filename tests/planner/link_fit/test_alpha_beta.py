"""Latency and bandwidth from times that follow the formulas, with noise and without."""

from __future__ import annotations

import numpy as np
import pytest

from pipeplan.link_fit.alpha_beta import TransferTime, fit_alpha_beta

SIZES = [4096 * 4**step for step in range(8)]


def ring_s(members: int, size: float, bandwidth: float, latency_s: float) -> float:
    """Every member sends a chunk of 1/members in each of 2 (members - 1) steps."""
    return 2 * (members - 1) * (size / members / bandwidth + latency_s)


@pytest.mark.parametrize(("bandwidth", "latency_s"), [(4e6, 2e-3), (1.25e9, 3e-5), (2e11, 5e-6)])
def test_times_without_noise_give_back_what_made_them(bandwidth: float, latency_s: float) -> None:
    found = fit_alpha_beta([TransferTime.message(size, latency_s + size / bandwidth) for size in SIZES])
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-4)
    assert found.latency_s == pytest.approx(latency_s, rel=1e-3)
    assert found.worst < 1e-3


def test_rings_of_several_sizes_are_one_link() -> None:
    points = [
        TransferTime.ring(members, size, ring_s(members, size, 1e9, 4e-5)) for members in (2, 4, 7) for size in SIZES
    ]
    found = fit_alpha_beta(points)
    assert found.bandwidth == pytest.approx(1e9, rel=1e-4)
    assert found.latency_s == pytest.approx(4e-5, rel=1e-3)
    assert found.seconds(TransferTime.ring(5, 10**7, 0.0)) == pytest.approx(ring_s(5, 10**7, 1e9, 4e-5), rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_five_percent_moves_the_bandwidth_by_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = [TransferTime.message(size, (3e-5 + size / 1e9) * np.exp(rng.normal(0, 0.05))) for size in SIZES * 3]
    found = fit_alpha_beta(points)
    assert found.bandwidth == pytest.approx(1e9, rel=0.05)
    assert found.latency_s == pytest.approx(3e-5, rel=0.15)
    assert 0.01 < found.error < 0.1


@pytest.mark.parametrize("size", [4096, 2**20, 4 * 2**20])
def test_one_disturbed_size_does_not_pull_the_rest(size: int) -> None:
    points = [TransferTime.message(one, (3e-5 + one / 1e9) * (4 if one == size else 1)) for one in SIZES]
    found = fit_alpha_beta(points)
    assert found.bandwidth == pytest.approx(1e9, rel=0.08)
    assert found.worst == pytest.approx(0.75, abs=0.05), "and it is stated"


def test_no_latency_to_see() -> None:
    found = fit_alpha_beta([TransferTime.message(size, size / 1e6) for size in SIZES])
    assert found.bandwidth == pytest.approx(1e6, rel=1e-3)
    assert found.latency_s < 1e-4 * SIZES[0] / 1e6 * 20


def test_times_that_no_link_has_give_an_infinite_bandwidth_and_no_overflow() -> None:
    points = [TransferTime.message(size, 1e-306) for size in SIZES]
    with np.errstate(all="raise", under="ignore"):
        assert fit_alpha_beta(points).bandwidth > 1e300

"""The published inference on CPUs, by hand."""

from __future__ import annotations

import itertools

import pytest

from table1 import inference


def test_the_multiplications_of_every_layer() -> None:
    products = {layer.name: layer.products for layer in inference.LAYERS}
    assert products == {"conv1": 28_224, "conv2": 225_792, "fc1": 313_600, "fc2": 40_000, "output": 2_000}
    assert sum(inference.shares().values()) == pytest.approx(1)


def test_the_cyclic_pipeline_goes_at_the_pace_of_its_slowest_layer() -> None:
    pipelined, parallel, *_ = inference.predict()
    one, slowest = inference.PIPELINED[0] / 10_000, 313_600 / 609_616
    # The first image passes all layers, the others follow at a quarter of the slowest layer's time.
    assert pipelined.seconds == pytest.approx(one + 9_999 * one * slowest / 4 + 5 * (5e-6 + 4e-9), rel=1e-9)
    assert parallel.seconds == pytest.approx(one + 9_999 * one / 20 + 5 * (5e-6 + 4e-9), rel=1e-9)
    assert pipelined.config == "4×(1-1-1-1-1)"


def test_both_published_ways_are_predicted_within_the_limit() -> None:
    pipelined, parallel, *_ = inference.predict()
    assert pipelined.error == pytest.approx(0.047, abs=0.001)
    assert parallel.error == pytest.approx(0.161, abs=0.001)


def test_the_reduction_is_logarithmic() -> None:
    step = inference.reduce_s(2)
    assert [round(inference.reduce_s(count) / step) for count in (1, 2, 3, 4, 5, 16, 17, 20)] == [
        0,
        1,
        2,
        2,
        3,
        4,
        5,
        5,
    ]


@pytest.mark.parametrize("work", [(0.05, 0.37, 0.51, 0.07), (1.0, 1.0, 1.0), (0.9, 0.05, 0.05)])
def test_replicas_for_given_stages_are_the_best(work: tuple[float, ...]) -> None:
    workers = 8
    ways = [counts for counts in itertools.product(range(1, workers + 1), repeat=len(work)) if sum(counts) == workers]
    paces = [max(one / count for one, count in zip(work, counts, strict=True)) for counts in ways]
    found = inference.balanced(work, workers)
    assert max(one / count for one, count in zip(work, found, strict=True)) == pytest.approx(min(paces))


def test_no_plan_is_better_than_data_parallelism_there() -> None:
    *_, best = inference.predict()
    assert best.config == "20"
    assert best.speedup == pytest.approx(20, rel=0.003)

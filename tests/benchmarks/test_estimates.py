"""Estimates beside PipeDream's published profiles: how near they are, and that the comparison can tell."""

from __future__ import annotations

import os
from pathlib import Path

import estimates
import pytest

from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model

FOLDER = Path(os.environ.get("PIPEPLAN_REFERENCE", "")) / "pipedream"
CASES = {case.name: case for case in estimates.CASES}


def _pairs(name: str) -> tuple[estimates.Pairs, estimates.Profile]:
    if not FOLDER.is_dir():
        pytest.skip("PIPEPLAN_REFERENCE names no folder with the published profiles")
    case = CASES[name]
    ours = profile_model(case.ref, ProfilerOptions(batches=(case.minibatch,), device="v100"))
    theirs = estimates.published(FOLDER / f"{name}.txt", case.minibatch)
    return case.correct(estimates.matched(theirs, estimates.pieces_of(ours.layers, lambda layer: layer.op))), ours


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_totals_are_within_15_percent_and_most_shares_within_25(name: str) -> None:
    pairs, _ = _pairs(name)
    theirs, ours = (sum(pair[side].time_s for pair in pairs) for side in (0, 1))
    assert abs(ours / theirs - 1) <= 0.15
    wrong = [abs(one) for _, one in estimates.large(pairs)]
    assert sum(one <= 0.25 for one in wrong) >= 0.75 * len(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg16", "alexnet", "resnet50"])
def test_images_get_the_plans_that_the_published_times_give(name: str) -> None:
    pairs, ours = _pairs(name)
    for cluster in "AB":
        by_published, by_estimate, loss = estimates.plan_by(ours, pairs, cluster)
        assert by_published == by_estimate
        assert loss == "0.0%"

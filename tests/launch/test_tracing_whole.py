"""What torch.export cannot trace is taken whole, as little of it as can be, and trains as in the whole model."""

from __future__ import annotations

import pytest
import torch
from stagewise import programs, random_pipeline
from test_split import check_evaluation, check_training
from traced_zoo_whole import ZOO, build

from pipeplan_launch.trace import trace

torch.set_num_threads(1)
BATCH = 6
HOW = {
    "stochastic-depth": "torch.export; taken whole: blocks.0, blocks.1, blocks.2, blocks.3",
    "routed": "torch.export; taken whole: blocks.0.router, blocks.1.router, blocks.2.router",
    "hooked": "torch.export; taken whole: clips",
    "cache": "torch.export; left out of what it returns: Cache",
}


@pytest.mark.parametrize("name", ZOO)
def test_split_equals_whole(name: str) -> None:
    job = build(name)
    traced = trace(job, BATCH)
    assert traced.how == HOW.get(name, "torch.export")
    assert traced.dynamic_batch
    for seed in range(4):
        stages = programs(traced, random_pipeline(traced, stages=2 + seed, seed=seed))
        for batch in (BATCH, BATCH + 3, 1) if name != "stochastic-depth" else (BATCH, BATCH + 3):
            check_training(name, job, stages, batch)
        check_evaluation(name, job, stages, BATCH)

"""Unmodified models of Hugging Face transformers, cut anywhere, train to the gradients of the whole."""

from __future__ import annotations

import pytest
import torch
from stagewise import consecutive_pipeline, programs, random_pipeline
from test_split import check_evaluation, check_training
from traced_zoo_hf import ZOO, build

from pipeplan_launch.trace import trace

torch.set_num_threads(1)
BATCH = 4
LEFT_OUT = "left out of what it returns"
HOW = {
    "gpt2": f"torch.export; {LEFT_OUT}: DynamicCache",
    "bert": "torch.export",
    "t5": f"torch.export; {LEFT_OUT}: EncoderDecoderCache",
    "mixtral-eager": "torch.export; taken whole: model.layers.0.mlp.experts, model.layers.1.mlp.experts; "
    f"{LEFT_OUT}: DynamicCache",
}


def check(name: str, granularity: str, count: int) -> None:
    job = build(name)
    traced = trace(job, BATCH, granularity)
    assert traced.how == HOW.get(name, HOW["gpt2"])
    assert traced.dynamic_batch
    # Where there are two branches, other pipelines draw the random numbers of dropout in another order.
    pipelines = [consecutive_pipeline(traced, stages=2 + seed % 3, seed=seed) for seed in range(count)]
    if name != "t5":
        pipelines += [random_pipeline(traced, stages=2 + seed % 3, seed=seed) for seed in range(count)]
    assert all(len(one) > 1 for one in pipelines[:count])
    for number, pipeline in enumerate(pipelines):
        stages = programs(traced, pipeline)
        check_training(name, job, stages, BATCH + number)
        if traced.evaluation_problem is None:
            check_evaluation(name, job, stages, BATCH)


@pytest.mark.parametrize(("name", "granularity"), [("gpt2", "module"), ("llama", "op"), ("t5", "layer")])
def test_split_equals_whole(name: str, granularity: str) -> None:
    check(name, granularity, 1)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["module", "layer", "op"])
@pytest.mark.parametrize("name", ZOO)
def test_split_equals_whole_for_all(name: str, granularity: str) -> None:
    check(name, granularity, 3)

"""Layouts of plans, read by Megatron Core: each rank builds the layers of its stage."""

from __future__ import annotations

import itertools
import shlex
from typing import Any

import pytest
from decoders import decoder, grid, problem
from deployed import need

from pipeplan.exports.megatron import FILE, TARGET
from pipeplan.exports.target import export_files
from pipeplan.plan.plan import Plan
from pipeplan.profile_data.profile import Profile

pytestmark = pytest.mark.deploy


@pytest.fixture
def megatron() -> Any:
    """Megatron Core's class of configurations, which checks a layout."""
    need("megatron-core", "0.16.1")
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig


def options(profile: Profile, plan: Plan) -> dict[str, str]:
    """The values of the exported options."""
    words = shlex.split(export_files(TARGET, problem(profile), plan)[FILE].text, comments=True)
    return dict(itertools.pairwise(words))


@pytest.mark.parametrize(
    ("cuts", "blocks"),
    [
        (["h.5.ln"], [5, 7]),
        (["h.0.ln", "h.11.ln", "ln_f"], [0, 11, 1, 0]),
        (["h.1.ln", "h.2.ln", "h.3.ln"], [1, 1, 1, 9]),
    ],
    ids=["uneven halves", "ends alone", "four"],
)
def test_every_rank_builds_the_layers_of_its_stage(cuts: list[str], blocks: list[int], megatron: Any) -> None:
    import torch
    from megatron.core.transformer.enums import LayerType

    profile = decoder(12)
    given = options(profile, grid(profile, cuts))
    stages = int(given["--pipeline-model-parallel-size"])
    config = megatron(
        num_layers=int(given["--num-layers"]),
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        pipeline_model_parallel_layout=given["--pipeline-model-parallel-layout"],
        pipeline_dtype=torch.float32,
    )
    layout = config.pipeline_model_parallel_layout
    assert config.virtual_pipeline_model_parallel_size is None
    assert [len(layout.get_layer_id_list(vp_stage=0, pp_rank=rank)) for rank in range(stages)] == blocks
    order = [block for rank in range(stages) for block in layout.get_layer_id_list(vp_stage=0, pp_rank=rank)]
    assert order == list(range(12))
    ends = [
        [rank for rank in range(stages) if layout.get_num_layers_to_build(kind, 0, rank)]
        for kind in (LayerType.embedding, LayerType.loss)
    ]
    assert ends == [[0], [stages - 1]]


def test_the_batch_has_the_microbatches_of_the_plan(megatron: Any) -> None:
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

    profile = decoder(4)
    given = options(profile, grid(profile, ["h.2.ln"], replicas=2, accumulate=24))
    sizes = int(given["--global-batch-size"]), int(given["--micro-batch-size"])
    count = ConstantNumMicroBatchesCalculator(*sizes, data_parallel_size=2, decrease_batch_size_if_needed=False, rank=0)
    assert count.get() == 12

"""What one layer is: a member of a list of modules, the call of a leaf module, or an operator."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import traced_zoo
import traced_zoo_whole
from stagewise import check_evaluation, check_training, programs, random_pipeline
from torch import Tensor, nn

from pipeplan_launch import Job
from pipeplan_launch.tracing.trace import TracedModel, trace_job

torch.set_num_threads(1)
BATCH = 6


def names(traced: TracedModel) -> list[str]:
    return [layer.name for layer in traced.layers]


class Stage(nn.Module):
    """Blocks inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Stage()))
        self.named = nn.ModuleDict({"one": Stage()})
        self.body = nn.Sequential(nn.Sequential(Stage(), Stage()), nn.Dropout(0.1))
        self.attention = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.named["one"](self.stem(x)))
        return self.head(self.attention(x.unsqueeze(1)) * 2)


def nested() -> Job:
    torch.manual_seed(0)
    return Job(Nested(), inputs=lambda n: torch.randn(n, 4), loss=lambda output, target: output.square().mean())


def test_modules_in_containers_are_layers_whatever_is_inside() -> None:
    traced = trace_job(nested(), BATCH, "module")
    expected = "stem.0 stem.1.0 stem.1.1 named.one body.0.0 body.0.1 body.1 attention.layers.0 attention.layers.1"
    assert names(traced) == [*expected.split(), "mul", "head", "loss"]
    block = traced.layers[5]
    assert (block.module, block.op) == ("body.0.1", "Stage")
    assert block.parameters == tuple(f"body.0.1.{name}" for name, _ in Stage().named_parameters())
    routed = trace_job(traced_zoo_whole.build("routed"), BATCH, "module")
    assert names(routed) == ["first", "blocks.0", "blocks.1", "blocks.2", "blocks.2#2", "last", "loss"]
    assert routed.how == "torch.export; taken whole: blocks.0.router, blocks.1.router, blocks.2.router"


@pytest.mark.parametrize("name", ["gpt", pytest.param("resnet-tiny", marks=pytest.mark.slow)])
def test_coarser_layers_are_made_of_finer_ones(name: str) -> None:
    """Parameters are read by layers of their modules, and what crosses between coarse layers crosses fine ones."""
    traced = [trace_job(traced_zoo.build(name), BATCH, granularity) for granularity in ("module", "layer", "op")]
    assert [len(one.layers) for one in traced] == sorted(len(one.layers) for one in traced)
    assert len({one.graph_hash for one in traced}) == 3
    crossing = [[(tensor.shape(BATCH), tensor.dtype) for tensor in one.tensors] for one in traced]
    for coarse, fine in pairwise(crossing):
        assert all(coarse.count(one) <= fine.count(one) for one in coarse)
    tied = {"head"} if name == "gpt" else set()
    for one in traced:
        for info in one.layers:
            if info.module not in tied:
                assert all(parameter.startswith(info.module) for parameter in info.parameters)


QUICK = [("nested", "module"), ("gpt", "op"), ("keeps-state", "module")]
EVERY = [(name, one) for name in ("nested", *traced_zoo.ZOO, *traced_zoo_whole.ZOO) for one in ("module", "op")]


@pytest.mark.parametrize(
    ("name", "granularity"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in EVERY]
)
def test_split_equals_whole(name: str, granularity: str) -> None:
    if name == "nested":
        job = nested()
    else:
        job = (traced_zoo_whole if name in traced_zoo_whole.ZOO else traced_zoo).build(name)
    traced = trace_job(job, BATCH, granularity)
    for seed in range(2 if (name, granularity) in QUICK else 5):
        stages = programs(traced, random_pipeline(traced, stages=2 + seed, seed=seed))
        check_training(name, job, stages, BATCH)
        check_evaluation(name, job, stages, BATCH)

"""The DAG of layers that tracing finds; a layer is a member of a list of modules, the call of a leaf module, or an
operator."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import traced_zoo_whole
from stagewise import check_evaluation, check_training, programs, random_pipeline
from torch import Tensor, nn
from traced_zoo import build

from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.trace import TracedModel, trace_job

BATCH = 6


def names(traced: TracedModel) -> list[str]:
    return [layer.name for layer in traced.layers]


def test_layers_are_named_after_modules_and_skip_connections_are_edges() -> None:
    traced = trace_job(build("resnet-tiny"), 4)
    assert names(traced)[:4] == ["conv", "bn", "relu", "stages.0.0.conv1"]
    assert {"stages.0.0.add", "stages.0.0.relu", "stages.0.0.relu#2", "stages.1.0.skip.1"} <= set(names(traced))
    assert names(traced)[-2:] == ["fc", "loss"]
    bn = next(layer for layer in traced.layers if layer.name == "bn")
    assert (bn.module, bn.op, bn.parameters) == ("bn", "BatchNorm2d", ("bn.weight", "bn.bias"))
    assert bn.buffers == ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked")
    edges = {tensor.name: tensor.consumers for tensor in traced.tensors}
    assert edges["relu"] == ("stages.0.0.conv1", "stages.0.0.add")
    assert edges["stages.0.0.relu#2"] == ("stages.1.0.skip.0", "stages.1.0.conv1")


def test_shapes_follow_the_minibatch() -> None:
    traced = trace_job(build("mnist"), 4)
    relu = next(tensor for tensor in traced.tensors if tensor.name == "relu#2")
    assert relu.shape(4) == (4, 32 * 7 * 7)
    assert relu.shape(7) == (7, 32 * 7 * 7)
    assert relu.bytes(7) == 7 * 32 * 7 * 7 * 4
    assert traced.dynamic_batch


def test_masks_positions_and_views_of_inputs_are_copied_not_sent() -> None:
    traced = trace_job(build("gpt"), 4)
    assert not any(tensor.dtype == torch.bool for tensor in traced.tensors)
    assert not any("arange" in layer.name or "tril" in layer.name for layer in traced.layers)
    digits = trace_job(Job(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), inputs=lambda n: torch.ones(n, 2, 2)), 3)
    assert [layer.name for layer in digits.layers] == ["1", "loss"]


def test_tensors_that_need_no_gradient_cross_without_one() -> None:
    traced = trace_job(build("routes"), 4)
    kinds = {tensor.name: (tensor.dtype, tensor.requires_grad) for tensor in traced.tensors}
    assert kinds["argmax"] == (torch.int64, False)
    assert kinds["middle"] == (torch.float32, True)
    assert kinds["score"] == (torch.float32, False)  # Only an argmax reads it: no gradient comes back.
    traced = trace_job(build("shared"), 4)
    assert not next(tensor for tensor in traced.tensors if tensor.producer == "frozen").requires_grad


def test_layers_that_share_parameters_are_tied() -> None:
    for name, groups in (("mnist", ()), ("gpt", (("tokens", "head"),)), ("shared", (("block", "block#2"),))):
        traced = trace_job(build(name), 4)
        assert tuple(tie.layers for tie in traced.tied) == groups
        assert not traced.together
        for tie in traced.tied:
            for layer in traced.layers:
                assert {*tie.names} <= {*layer.parameters} or layer.name not in tie.layers


class Views(nn.Module):
    """Two layers whose parameters are different views of one memory, which no copy can stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = nn.Parameter(self.one.weight.data.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)))


def test_layers_that_write_where_others_read_stay_together() -> None:
    traced = trace_job(Job(Views(), inputs=lambda n: torch.ones(n, 4)), 3)
    assert traced.together == (("one", "two"),)
    assert not traced.tied
    (group,) = trace_job(build("writes-into-views"), 4).together
    assert {"mul", "sum", "add_"} <= set(group)
    assert not {"first", "third"} & set(group)
    (group,) = trace_job(build("keeps-state"), 4).together
    assert {"mul_", "add_", "add"} <= set(group), "the buffer is written and read again"


def test_the_minibatch_may_have_one_size_or_one_sample() -> None:
    traced = trace_job(build("one-size"), 6)
    assert (traced.dynamic_batch, traced.minibatch) == (False, 6)
    traced = trace_job(build("mnist"), 1)
    assert (traced.dynamic_batch, traced.minibatch) == (True, 1)


def test_batch_in_the_second_dimension() -> None:
    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.rnn(x)[0])

    traced = trace_job(Job(SequenceFirst(), inputs=lambda n: torch.randn(5, n, 3)), 2)
    assert traced.dynamic_batch
    assert traced.tensors[0].shape(9) == (5, 9, 4)


def test_modules_named_like_our_own_layers() -> None:
    class Awkward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.Linear(2, 2)
            self.add_module("a b $(x) 'q'", nn.Linear(2, 2))

        def forward(self, x):
            return getattr(self, "a b $(x) 'q'")(self.loss(x))

    traced = trace_job(Job(Awkward(), inputs=lambda n: torch.randn(n, 2)), 3)
    assert names(traced) == ["loss#2", "a b $(x) 'q'", "loss"]


@pytest.mark.slow
def test_hash_is_the_same_in_every_process_and_for_every_minibatch() -> None:
    code = (
        "import traced_zoo, traced_zoo_whole; from pipeplan_launch.tracing.trace import trace_job;"
        "jobs = [traced_zoo.build(name) for name in ('mnist', 'routes', 'keeps-state')];"
        "jobs += [traced_zoo_whole.build(name) for name in ('hooked', 'adversary')];"
        "print(*[trace_job(job, 8).graph_hash for job in jobs])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.path.dirname(traced_zoo_whole.__file__)}
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    jobs = [build(name) for name in ("mnist", "routes", "keeps-state")]
    jobs += [traced_zoo_whole.build(name) for name in ("hooked", "adversary")]
    assert found.stdout.split() == [trace_job(job, 6).graph_hash for job in jobs]
    assert trace_job(build("mnist"), 6).graph_hash != trace_job(build("gpt"), 6).graph_hash


def test_a_name_that_no_graph_can_hold_is_quoted() -> None:
    for name in ('a"b', "a\nb"):
        model = nn.Sequential()
        model.add_module(name, nn.Linear(2, 2))
        with pytest.raises(LaunchError, match="take the quotes, backslashes and line breaks out") as caught:
            trace_job(Job(model, inputs=lambda n: torch.randn(n, 2)), 4)
        assert repr(name) in str(caught.value)


class Items(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * y.max().item()


class Numpy(nn.Linear):
    def forward(self, x):
        return super().forward(torch.from_numpy(x.numpy()))


class Picks(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y[y > 0] * 2


def test_what_cannot_be_traced_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    for kind, says in (
        (Items, "depends on the data, at FILE: return y * y.max().item(); compute it with fixed shapes"),
        (Picks, "depends on the data, at FILE: return y[y > 0] * 2"),
        (Numpy, "cannot be traced by torch.export (FILE: return super().forward(torch.from_numpy(x.numpy())))"),
    ):
        lines, start = inspect.getsourcelines(kind)
        number = start + next(index for index, line in enumerate(lines) if f"FILE: {line.strip()}" in says)
        with pytest.raises(LaunchError) as caught:
            trace_job(Job(kind(2, 2), inputs=lambda n: torch.randn(n, 2)), 4)
        assert says.replace("FILE", f"{__file__}:{number}") in str(caught.value)
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
    with pytest.raises(LaunchError, match=r"fails on its example inputs \(4×5\): .*\(4x5 and 2x2\)"):
        trace_job(Job(nn.Sequential(nn.Linear(2, 2)), inputs=lambda n: torch.randn(n, 5)), 4)


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


def test_modules_in_containers_are_layers_whatever_is_inside() -> None:
    torch.manual_seed(0)
    job = Job(Nested(), inputs=lambda n: torch.randn(n, 4), loss=lambda output, target: output.square().mean())
    traced = trace_job(job, BATCH, "module")
    expected = "stem.0 stem.1.0 stem.1.1 named.one body.0.0 body.0.1 body.1 attention.layers.0 attention.layers.1"
    assert names(traced) == [*expected.split(), "mul", "head", "loss"]
    block = traced.layers[5]
    assert (block.module, block.op) == ("body.0.1", "Stage")
    assert block.parameters == tuple(f"body.0.1.{name}" for name, _ in Stage().named_parameters())
    for seed in range(2):
        stages = programs(traced, random_pipeline(traced, stages=2 + seed, seed=seed))
        check_training("nested", job, stages, BATCH)
        check_evaluation("nested", job, stages, BATCH)
    routed = trace_job(traced_zoo_whole.build("routed"), BATCH, "module")
    assert names(routed) == ["first", "blocks.0", "blocks.1", "blocks.2", "blocks.2#2", "last", "loss"]
    assert routed.how == "torch.export; taken whole: blocks.0.router, blocks.1.router, blocks.2.router"


@pytest.mark.parametrize("name", ["gpt", pytest.param("resnet-tiny", marks=pytest.mark.slow)])
def test_coarser_layers_are_made_of_finer_ones(name: str) -> None:
    """Parameters are read by layers of their modules, and what crosses between coarse layers crosses fine ones."""
    traced = [trace_job(build(name), BATCH, granularity) for granularity in ("module", "layer", "op")]
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

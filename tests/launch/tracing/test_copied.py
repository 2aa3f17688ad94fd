"""What every stage computes for itself, instead of receiving it: rotary embeddings, masks, positions, labels."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from extents import slow_but_for
from stagewise import check_evaluation, check_training, consecutive_pipeline, programs, random_pipeline
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch import Job
from pipeplan_launch.tracing.regions import operator_name
from pipeplan_launch.tracing.shared_copies import shared_copies
from pipeplan_launch.tracing.subgraph import cut_subgraph
from pipeplan_launch.tracing.trace import TracedModel, trace_job

BATCH, WORDS, LENGTH, WIDTH = 6, 11, 5, 8


class Rotary(nn.Module):
    """Cosines and sines of every position, as language models compute them once for all their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", 10.0 ** -torch.arange(0, WIDTH, 2), persistent=False)

    @torch.no_grad()
    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (self.rates[None, :, None].double() @ positions[:, None, :].double()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


class Decoder(nn.Module):
    """A decoder with a padding mask that returns the loss against its own shifted inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rotary = nn.Embedding(WORDS, WIDTH), Rotary()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        cos, sin = self.rotary((ids != 0).cumsum(dim=1))
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = causal & (ids != 0)[:, None, :] | torch.eye(LENGTH, dtype=torch.bool)
        for block in self.blocks:
            value = block(x)
            query = value * cos + value.roll(WIDTH // 2, -1) * sin
            x = x + functional.scaled_dot_product_attention(query, query, value, mask)
        labels = functional.pad(ids, (0, 1))[:, 1:]
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def decoder() -> Job:
    torch.manual_seed(0)

    def ids(samples: int) -> Tensor:
        drawn = torch.randint(1, WORDS, (samples, LENGTH))
        drawn[::2, 3:] = 0
        return drawn

    return Job(Decoder().double(), inputs=ids, loss=lambda output, target: output)


@pytest.fixture(scope="module")
def traced() -> TracedModel:
    return trace_job(decoder(), BATCH)


def test_they_are_in_no_layer_and_cross_no_cut(traced: TracedModel) -> None:
    assert all(spec.requires_grad for spec in traced.tensors)
    assert not [layer.name for layer in traced.layers if layer.op in ("Rotary", "cumsum", "ne", "pad", "tril")]
    fans = {spec.producer: spec.consumers for spec in traced.tensors if len(spec.consumers) > 4}
    assert fans == {}


@pytest.mark.parametrize("granularity", slow_but_for(["layer"], ["module", "layer", "op"]))
def test_stages_equal_the_whole_in_float64(granularity: str) -> None:
    """Cut after every layer in turn, and at random."""
    job = decoder()
    traced = trace_job(job, BATCH, granularity)
    names = [layer.name for layer in traced.layers]
    pipelines = [[names[:at], names[at:]] for at in range(1, len(names))] + [[[name] for name in names]]
    pipelines += [consecutive_pipeline(traced, stages=4, seed=seed) for seed in range(3)]
    pipelines += [random_pipeline(traced, stages=4, seed=seed) for seed in range(3)]
    for number, pipeline in enumerate(pipelines):
        stages = programs(traced, pipeline)
        check_training("decoder", job, stages, BATCH + number % 2, rounds=number >= len(pipelines) - 3)
        check_evaluation("decoder", job, stages, BATCH)


def test_a_stage_reads_the_data_only_for_what_it_computes(traced: TracedModel) -> None:
    names = [layer.name for layer in traced.layers]
    at = names.index("head")
    cuts = [names[: names.index("blocks.1")], names[names.index("blocks.1") : at], names[at:-1], names[-1:]]
    assert [one.model_inputs for one in programs(traced, cuts)] == [(0,), (0,), (0,), ()]


def test_layers_run_one_by_one_compute_them_once(traced: TracedModel) -> None:
    copies = shared_copies(traced)
    tensors = (*traced.tensors, *copies.tensors)
    operators: Counter[str] = Counter()
    for layer in traced.layers:
        received = [spec.name for spec in tensors if layer.name in spec.consumers]
        made = [spec.name for spec in tensors if spec.producer == layer.name]
        segment = cut_subgraph(traced, [layer.name], received, made, copies=copies.node_of)
        operators.update(operator_name(node) for node in segment.run.graph.nodes if node.op == "call_function")
    written = Counter(operator_name(node) for node in calls(traced))
    assert written["wrap_with_set_grad_enabled"] == 1
    for name in ("wrap_with_set_grad_enabled", "cumsum", "tril", "eye", "__or__", "pad", "ne"):
        assert operators[name] == written[name] > 0, name


def calls(traced: TracedModel) -> list[torch.fx.Node]:
    return [node for node in traced.graph_module.graph.nodes if node.op == "call_function"]


class Expensive(nn.Module):
    """Work on the data without parameters: some of it takes time, draws random numbers, or changes state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", torch.randn(4, 4))
        self.register_buffer("seen", torch.zeros(()))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.out = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            product = x @ self.basis
            noisy = functional.dropout(x, 0.5, training=self.training)
            frozen = self.frozen(x).cos()
            normal = self.norm(x)
            self.seen.add_(1.0)
            counted = x * self.seen
        outer = x[:, :, None] @ x[:, None, :]
        given = product + noisy + frozen + normal + counted + outer.sum(dim=1)
        return self.out[1](self.out[0](given) + given).square().mean()


def test_what_is_expensive_random_or_changes_state_stays_in_a_layer() -> None:
    torch.manual_seed(0)
    job = Job(Expensive(), inputs=lambda n: torch.randn(n, 4), loss=lambda output, target: output)
    traced = trace_job(job, BATCH)
    work = {operator_name(node): node in traced.layer_of for node in calls(traced)}
    assert not work["sum"]  # of the outer product
    held = {layer for node, layer in traced.layer_of.items() if operator_name(node) == "wrap_with_set_grad_enabled"}
    assert held
    for seed in range(3):
        check_training("expensive", job, programs(traced, random_pipeline(traced, stages=3, seed=seed)), BATCH)

"""Unmodified models of Hugging Face transformers, cut anywhere, train to the gradients of the whole; and the examples
of docs/models.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from extents import slow_but_for
from repository import ROOT
from stagewise import (
    backward,
    check_evaluation,
    check_training,
    consecutive_pipeline,
    forward,
    programs,
    random_pipeline,
)
from torch.nn import functional
from traced_zoo_hf import ZOO, build

from pipeplan_launch import load_job
from pipeplan_launch.job.job import collate_samples
from pipeplan_launch.tracing.trace import trace_job

BATCH = 4
DOCUMENT = ROOT / "docs" / "models.md"
LEFT_OUT = "left out of what it returns"
HOW = {
    "gpt2": f"torch.export; {LEFT_OUT}: DynamicCache",
    "bert": "torch.export",
    "t5": f"torch.export; {LEFT_OUT}: EncoderDecoderCache",
    "mixtral-eager": "torch.export; taken whole: model.layers.0.mlp.experts, model.layers.1.mlp.experts; "
    f"{LEFT_OUT}: DynamicCache",
}


EVALUATES_OTHERWISE = "MixtralSparseMoeBlock does other work in evaluation mode than in training mode (self.training)"
EVERY = [(name, granularity) for name in ZOO for granularity in ("module", "layer", "op")]


@pytest.mark.parametrize("case", slow_but_for([("gpt2", "layer")], EVERY), ids="-".join)
def test_split_equals_whole(case: tuple[str, str]) -> None:
    name, granularity = case
    job, count = build(name), 1 if case == ("gpt2", "layer") else 3
    traced = trace_job(job, BATCH, granularity)
    assert traced.how == HOW.get(name, HOW["gpt2"])
    assert traced.dynamic_batch
    # Where there are two branches, other pipelines draw the random numbers of dropout in another order.
    pipelines = [consecutive_pipeline(traced, stages=2 + seed % 3, seed=seed) for seed in range(count)]
    if name != "t5":
        pipelines += [random_pipeline(traced, stages=2 + seed % 3, seed=seed) for seed in range(count)]
    assert all(len(one) > 1 for one in pipelines[:count])
    for number, pipeline in enumerate(pipelines):
        stages = programs(traced, pipeline)
        # Qwen2-MoE's blocks have a shared expert beside the others, so that any cut may be inside a fan.
        rounds = number >= count or name == "qwen"
        check_training(name, job, stages, BATCH + number, rounds=rounds)
        if name == "mixtral":  # its router multiplies by noise in training alone
            assert traced.evaluation_problem == EVALUATES_OTHERWISE
            continue
        assert traced.evaluation_problem is None
        check_evaluation(name, job, stages, BATCH, rounds=rounds)


def test_only_the_hidden_state_of_a_llama_crosses_between_its_blocks() -> None:
    """Not the cosines and sines of the rotary embedding, nor the mask, which every stage computes for itself."""
    job = build("llama-masked")
    traced = trace_job(job, BATCH)
    names = [layer.name for layer in traced.layers]
    at = names.index("model.layers.1.input_layernorm")
    stages = programs(traced, [names[:at], names[at:]])
    check_training("llama-masked", job, stages, BATCH)
    assert [(spec.shape(BATCH), spec.requires_grad) for spec in stages[1].receives] == [((BATCH, 7, 16), True)]
    assert [traced.input_names[index] for index in stages[1].model_inputs] == ["attention_mask"]
    assert all(spec.requires_grad for spec in traced.tensors)


def test_the_job_file_of_the_documentation(tmp_path: Path) -> None:
    source, _ = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(source.splitlines()) <= 20
    (tmp_path / "circles.py").write_text(source)
    job = load_job(f"{tmp_path / 'circles.py'}:make", seed=0)
    traced = trace_job(job, job.minibatch)
    assert [layer.name for layer in traced.layers] == ["0", "1", "2", "3", "4", "loss"]
    first, second = programs(traced, [["0", "1"], ["2", "3", "4", "loss"]])
    optimizers = [job.make_optimizer(list(stage.parameters())) for stage in (first, second)]
    points, labels = (tensor[:512] for tensor in job.datasets.train.tensors)
    for _ in range(60):
        output = second(first([], [points], 512), [], 512)
        functional.cross_entropy(output, labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert job.correct(output, labels) > 0.95 * 512


@pytest.mark.slow
def test_the_job_of_the_documentation_for_a_model_of_transformers(tmp_path: Path) -> None:
    """It learns, in two stages, from dictionaries that are inputs and target in one."""
    _, source = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "counting.py").write_text(source)
    job = load_job(f"{tmp_path / 'counting.py'}:make", seed=0)
    traced = trace_job(job, 16, "module")
    names = [layer.name for layer in traced.layers]
    blocks = [f"model.layers.{number}" for number in range(4)]
    assert [name for name in names if name in blocks] == blocks
    at = names.index("model.layers.2")
    stages = programs(traced, [names[:at], names[at:]])
    optimizers = [job.make_optimizer(list(stage.parameters())) for stage in stages]
    data = job.datasets.train
    losses = []
    for step in range(12):
        batch = collate_samples([data[(16 * step + index) % len(data)] for index in range(16)])
        output, received, made = forward(stages, batch.inputs, 16)
        loss = job.loss(output, batch.target)
        backward(loss, received, made)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]

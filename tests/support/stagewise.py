"""Run stage programs one after the other in one process, with the tensors between them sent by hand.

`train_beside_one_process` trains them beside the same model as it is, in plain PyTorch.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeplan_launch import Job
from pipeplan_launch.job.job import call_model
from pipeplan_launch.tracing.model_outputs import without_unknown_objects
from pipeplan_launch.tracing.split import StageProgram, build_stage_program
from pipeplan_launch.tracing.trace import TracedModel, trace_job

torch.set_num_threads(1)
BATCH = 6
# Slices become contiguous on the wire, and a product of contiguous matrices may round elsewhere.
ROUNDS = {"wraps"}


def random_pipeline(traced: TracedModel, stages: int, seed: int) -> list[list[str]]:
    """A random valid pipeline of at most that many stages."""
    chance = random.Random(seed)
    stage_of = {layer.name: 0 for layer in traced.layers}
    edges = [(one.producer, consumer) for one in traced.tensors for consumer in one.consumers]
    for layer in traced.layers:
        earliest = max((stage_of[a] for a, b in edges if b == layer.name), default=0)
        step = chance.random() < 2.0 * stages / len(traced.layers)
        stage_of[layer.name] = min(stages - 1, chance.randint(0, 1) if not earliest and step else earliest + step)
    stage_of["loss"] = max(stage_of.values())
    while True:
        before = dict(stage_of)
        for group in traced.together:
            latest = max(stage_of[name] for name in group)
            stage_of.update(dict.fromkeys(group, latest))
        for a, b in edges:
            stage_of[b] = max(stage_of[a], stage_of[b])
        if before == stage_of:
            break
    used = sorted(set(stage_of.values()))
    return [[layer.name for layer in traced.layers if stage_of[layer.name] == stage] for stage in used]


def consecutive_pipeline(traced: TracedModel, stages: int, seed: int) -> list[list[str]]:
    """The model's layers in their order, cut at random: random numbers are then drawn as by the whole model, too."""
    names = [layer.name for layer in traced.layers]
    before = [set(names[:at]) for at in range(len(names))]
    allowed = [
        at
        for at in range(1, len(names))
        if all(before[at].issuperset(group) or before[at].isdisjoint(group) for group in traced.together)
    ]
    cuts = sorted(random.Random(seed).sample(allowed, min(stages - 1, len(allowed))))
    return [names[start:end] for start, end in zip([0, *cuts], [*cuts, len(names)], strict=True)]


def programs(traced: TracedModel, pipeline: Sequence[Sequence[str]]) -> list[StageProgram]:
    return [build_stage_program(traced, pipeline, stage) for stage in range(len(pipeline))]


def forward(
    stages: Sequence[StageProgram], inputs: Sequence[Tensor], batch: int
) -> tuple[Any, list[list[Tensor]], Any]:
    """The model's output, what each stage received, and what each stage sent."""
    sent: Sequence[Tensor] = ()
    received, made = [], []
    for stage in stages:
        arrived = [
            # Without gradients none may ask for one: some operators choose their kernel by that.
            tensor.detach().clone().requires_grad_(spec.requires_grad and torch.is_grad_enabled())
            for spec, tensor in zip(stage.receives, sent, strict=True)
        ]
        for spec, tensor in zip(stage.receives, arrived, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape(batch), spec.dtype), spec.name
        received.append(arrived)
        own = [inputs[index] for index in stage.model_inputs]
        sent = stage.call(stage.parameters_by_name(), arrived, own, batch)
        made.append(sent)
    return sent, received, made


def backward(loss: Tensor, received: list[list[Tensor]], made: list[Sequence[Tensor]]) -> None:
    """Send the gradients back, stage by stage."""
    loss.backward()
    for stage in reversed(range(len(made) - 1)):
        pairs = [
            (tensor, torch.zeros_like(later) if later.grad is None else later.grad)
            for tensor, later in zip(made[stage], received[stage + 1], strict=True)
            if later.requires_grad
        ]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])


def equal(one, other, name: str = "", *, rounds: bool = False) -> bool:
    if not isinstance(one, torch.Tensor):
        return one == other
    if (rounds or name in ROUNDS) and one.is_floating_point():
        close, least = (1e-12, 1e-14) if one.dtype is torch.float64 else (1e-5, 1e-7)
        return torch.allclose(one, other, rtol=close, atol=least)
    return one.dtype == other.dtype and torch.equal(one, other)


def inputs_of(job, batch):
    torch.manual_seed(7)
    return job.example_inputs(batch)


def call(job, model, inputs):
    """What the model returns, less what no stage can send."""
    return without_unknown_objects(call_model(model, inputs, job.input_names), {})


def autocast_of(job):
    """The context in which the whole model computes as the job says."""
    return nullcontext() if job.autocast is None else torch.autocast("cpu", dtype=job.autocast)


def target_of(job, batch):
    return torch.arange(batch) % 10 if job.name else None


def check_training(model, job, stages, batch, *, rounds=False):
    """`rounds`: boundaries inside a fan of branches may change the order of sums, and the layout of tensors."""
    whole = copy.deepcopy(job.model).train()
    inputs = inputs_of(job, batch)
    torch.manual_seed(3)
    with autocast_of(job):
        expected = call(job, whole, copy.deepcopy(inputs))
        expected_loss = job.loss(expected, target_of(job, batch))
    expected_loss.backward()

    job.model.zero_grad()
    for stage in stages:
        stage.train()
    torch.manual_seed(3)
    output, received, made = forward(stages, copy.deepcopy(inputs), batch)
    with autocast_of(job):
        loss = job.loss(output, target_of(job, batch))
    backward(loss, received, made)

    assert equal(loss, expected_loss, model, rounds=rounds)
    assert type(output) is type(expected)
    assert all(
        equal(a, b, model, rounds=rounds) for a, b in zip(tree_leaves(output), tree_leaves(expected), strict=True)
    )
    ours = dict(job.model.named_parameters())
    held = Counter(id(one) for stage in stages for one in stage.parameters())
    for name, parameter in whole.named_parameters():
        if job.autocast is not None and held[id(ours[name])] > 1:
            # One process adds the gradients of both uses in bfloat16, stages add theirs in 32 bits.
            torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=2**-7, atol=2**-12)
        else:
            # Autograd adds the gradients of several uses in another order than stages that each hold some of the uses.
            reordered = rounds or held[id(ours[name])] > 1
            assert equal(ours[name].grad, parameter.grad, model, rounds=reordered), name
    for (name, own), (_, other) in zip(job.model.named_buffers(), whole.named_buffers(), strict=True):
        assert equal(own, other, model), name


def check_evaluation(model, job, stages, batch, *, rounds=False):
    whole = copy.deepcopy(job.model).eval()
    inputs = inputs_of(job, batch)
    with torch.no_grad():
        with autocast_of(job):
            expected = call(job, whole, copy.deepcopy(inputs))
        for stage in stages:
            stage.eval()
        output, _, _ = forward(stages, copy.deepcopy(inputs), batch)
    assert all(
        equal(a, b, model, rounds=rounds) for a, b in zip(tree_leaves(output), tree_leaves(expected), strict=True)
    )
    for (name, own), (_, other) in zip(job.model.named_buffers(), whole.named_buffers(), strict=True):
        assert equal(own, other, model), name


STEPS = 3


def job_of(model: nn.Module, inputs: Callable[[int], Tensor] | None = None) -> Job:
    return Job(model, inputs=inputs or (lambda n: torch.randn(n, 4)))


def train_beside_one_process(job: Job, *, seed: int = 0, evaluates: bool = True) -> TracedModel:
    """Trace the job, cut it at random, and train and evaluate it for some steps. Fails where anything differs.

    Compares losses, parameters, all buffers, and what an evaluation after each step gives.
    """
    whole = copy.deepcopy(job.model)
    names = [name for name, _ in whole.named_buffers()]
    traced = trace_job(job, BATCH)
    assert state(whole, names) == state(job.model, names), "tracing changes the model"
    stages = programs(traced, random_pipeline(traced, stages=3, seed=seed))
    optimizers = [torch.optim.SGD(list(one.parameters()), lr=0.1, momentum=0.9) for one in (whole, job.model)]
    for step in range(STEPS):
        torch.manual_seed(step)
        batch = job.example(BATCH)
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(100 + step)
        expected = batch.call(whole.train()).square().mean()
        expected.backward()
        for stage in stages:
            stage.train()
        torch.manual_seed(100 + step)
        output, received, made = forward(stages, list(batch.inputs), BATCH)
        loss = output.square().mean()
        backward(loss, received, made)
        assert torch.equal(loss, expected), step
        for optimizer in optimizers:
            optimizer.step()
        assert state(whole, names) == state(job.model, names), step
        if evaluates:
            assert traced.evaluation_problem is None
            with torch.no_grad():
                expected = batch.call(whole.eval())
                output, _, _ = forward([stage.eval() for stage in stages], list(batch.inputs), BATCH)
            assert torch.equal(output, expected), step
            assert state(whole, names) == state(job.model, names), f"evaluation after step {step}"
    return traced


def state(model: nn.Module, buffers: list[str]) -> dict[str, list]:
    """Parameters and buffers, comparable bit by bit."""
    tensors = {**dict(model.named_parameters()), **{name: model.get_buffer(name) for name in buffers}}
    return {name: tensor.tolist() for name, tensor in tensors.items()}

"""Losses with parameters and buffers, by real workers: trained, evaluated, saved and exported as one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import state_jobs
import torch
from feature_workers import cut_before, run, traced, trained
from state_jobs import LOSSES, MINIBATCH, SAMPLES
from torch import Tensor, nn

from pipeplan_launch import Job, export, load_job
from pipeplan_launch.checkpoint.checkpoint import complete_checkpoints
from pipeplan_launch.job.pass_conditions import mix_seed

torch.set_num_threads(1)


def reference(name: str) -> str:
    return f"{state_jobs.__file__}:{name}"


def modules_of(job: Job) -> list[nn.Module]:
    """The modules of the loss, found by hand."""
    loss: Any = job.loss
    if isinstance(loss, nn.Module):
        return [loss]
    cells = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or ()]
    return cells or getattr(loss, "parts", None) or [getattr(loss, "__self__", None) or loss.args[1]]


def in_one_process(name: str, epochs: int) -> tuple[dict[str, Tensor], float]:
    """(the state of the model and of the loss's modules, the test loss) after an ordinary training loop."""
    job = load_job(reference(name), 0)
    model, data, losses = job.model, job.datasets, modules_of(job)
    assert job.optimizer is not None
    assert job.loss is not None
    optimizer = job.optimizer([*model.parameters(), *(parameter for one in losses for parameter in one.parameters())])
    for epoch in range(epochs):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mix_seed("order", 0, epoch)))
        for chosen in order.split(MINIBATCH):
            inputs, target = data.train[chosen]  # type: ignore[index]
            optimizer.zero_grad()
            job.loss(model(inputs), target).backward()
            optimizer.step()
    prefixes = ["loss."] if len(losses) == 1 else ["loss.first.", "loss.second."]
    of_loss = [{key: value.clone() for key, value in one.state_dict().items()} for one in losses]
    states = [
        {prefix + key: value for key, value in one.items()} for prefix, one in zip(prefixes, of_loss, strict=True)
    ]
    total = 0.0
    for chosen in torch.arange(SAMPLES).split(MINIBATCH):
        for one, before in zip(losses, of_loss, strict=True):
            one.load_state_dict(before)
            one.eval()
        inputs, target = data.test[chosen]  # type: ignore[index]
        total += job.loss(model.eval()(inputs), target).item() * len(target)
    return {**dict(model.state_dict()), **{key: value for one in states for key, value in one.items()}}, total / SAMPLES


@pytest.mark.parametrize("name", [n if n == "closure" else pytest.param(n, marks=pytest.mark.slow) for n in LOSSES])
def test_a_loss_with_state_is_trained_and_evaluated(tmp_path: Path, name: str) -> None:
    """Bit by bit. Evaluation between the epochs leaves no trace in the loss's buffers."""
    ref, plan = reference(name), {"schedule": "1f1b-flush", "accumulate": 1}
    folder = run(tmp_path, ref, cut_before(traced(ref), "last"), [1, 1], "--epochs", "2", **plan)
    ours, (expected, test_loss) = trained(folder), in_one_process(name, 2)
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(ours[key], value), key
    last = json.loads((folder / "summary.json").read_text())["epochs"][-1]
    assert last["test_loss"] == pytest.approx(test_loss, rel=1e-12)


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path, recompute: bool) -> None:
    """Two replicas of the loss, whose gradients and buffers are averaged; a second pass leaves the buffers alone."""
    ref, plan = reference("module"), {"recompute": [recompute] * 2}
    options = ["--epochs", "2", "--checkpoint-minibatches", "2"]
    stages = cut_before(traced(ref), "last")
    whole = run(tmp_path / "whole", ref, stages, [1, 2], *options, **plan)
    middle = complete_checkpoints(whole)[-2]
    part = run(tmp_path / "part", ref, stages, [1, 2], *options, "--resume-from", str(middle), **plan)
    ours, theirs = trained(part), trained(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert int(theirs["loss.calls"]) == 4, "each replica has run half of eight minibatches"
    check_export(whole, tmp_path, theirs)


def check_export(folder: Path, to: Path, saved: dict[str, Tensor]) -> None:
    """The model's file has the model only, and the loss's has the loss."""
    assert export.main([str(folder), "-o", str(to / "model.pt")]) == 0
    assert export.main([str(folder), "-o", str(to / "loss.pt"), "--loss"]) == 0
    state_jobs.Net().double().load_state_dict(torch.load(to / "model.pt", weights_only=True))
    centres = state_jobs.Centres()
    centres.load_state_dict(torch.load(to / "loss.pt", weights_only=True))
    assert torch.equal(centres.centres, saved["loss.centres"])

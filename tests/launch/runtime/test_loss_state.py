"""Losses with parameters and buffers: trained and saved as one plain process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import state_jobs
import torch
from feature_workers import cut_before, run, traced, trained
from state_jobs import LOSSES, MINIBATCH, SAMPLES
from torch import Tensor, nn

from pipeplan_launch import Job, load_job
from pipeplan_launch.job.seeds import mix_seed

torch.set_num_threads(1)


def reference(name: str) -> str:
    return f"{state_jobs.__file__}:{name}"


def order(epoch: int) -> Tensor:
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mix_seed("order", 0, epoch)))


def modules_of(job: Job) -> list[nn.Module]:
    """The modules of the loss, found by hand."""
    loss: Any = job.loss
    match loss:
        case nn.Module():
            return [loss]
        case state_jobs.Plain():
            return loss.parts
    cells = [cell.cell_contents for cell in getattr(loss, "__closure__", None) or ()]
    return cells or [getattr(loss, "__self__", None) or loss.args[1]]


def in_one_process(name: str, epochs: int) -> dict[str, Tensor]:
    """The state of the model and of the loss's modules after an ordinary training loop."""
    job = load_job(reference(name), 0)
    model, data, losses = job.model, job.datasets, modules_of(job)
    every = [*model.parameters(), *(parameter for one in losses for parameter in one.parameters())]
    assert job.optimizer is not None and job.loss is not None
    optimizer = job.optimizer(every)
    for epoch in range(epochs):
        for chosen in order(epoch).split(MINIBATCH):
            inputs, target = data.train[chosen]  # type: ignore[index]
            optimizer.zero_grad()
            job.loss(model(inputs), target).backward()
            optimizer.step()
    state = dict(model.state_dict())
    prefixes = ["loss."] if len(losses) == 1 else ["loss.first.", "loss.second."]
    for prefix, one in zip(prefixes, losses, strict=True):
        state |= {prefix + key: value for key, value in one.state_dict().items()}
    return state


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_state_is_trained_and_saved(tmp_path: Path, name: str) -> None:
    ref = reference(name)
    options = {"schedule": "1f1b-flush", "accumulate": 1}
    folder = run(tmp_path, ref, cut_before(traced(ref), "last"), [1, 1], "--epochs", "2", **options)
    ours, expected = trained(folder), in_one_process(name, 2)
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(ours[key], value), key

"""Hooks, parametrizations and complex weights by real workers, against one process that takes whole batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import state_jobs
import torch
from feature_workers import cut_before, run, traced, trained
from state_jobs import MINIBATCH, SAMPLES
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from pipeplan_launch import load_job
from pipeplan_launch.job.pass_conditions import mix_seed

torch.set_num_threads(1)


def on_whole_batches(name: str, accumulate: int) -> dict[str, Tensor]:
    """The model's state after one epoch, with the samples of an update in one batch."""
    job = load_job(f"{state_jobs.__file__}:{name}", 0)
    assert job.optimizer is not None
    assert job.loss is not None
    optimizer, train = job.optimizer([*job.model.parameters()]), job.datasets.train
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mix_seed("order", 0, 0)))
    for chosen in order.split(accumulate * MINIBATCH):
        inputs, target = train[chosen]  # type: ignore[index]
        optimizer.zero_grad()
        job.loss(job.model(inputs), target).backward()
        if job.clip_norm is not None:
            clip_grad_norm_(job.model.parameters(), job.clip_norm)
        optimizer.step()
    return dict(job.model.state_dict())


@pytest.mark.parametrize(
    ("name", "replicas", "options"),
    [
        ("waves", [2, 1], []),
        pytest.param("waves", [1, 2], [], marks=pytest.mark.slow),
        pytest.param("waves_adam", [2, 1], ["--shard-optimizer"], marks=pytest.mark.slow),
    ],
)
def test_an_update_is_that_of_one_process_with_the_whole_batch(
    tmp_path: Path, name: str, replicas: list[int], options: list[str]
) -> None:
    """Hooks on parameters get the mean gradient; clipping comes after them, with the norm of complex gradients too."""
    reference = f"{state_jobs.__file__}:{name}"
    plan = {"schedule": "1f1b-flush", "accumulate": 2}
    folder = run(tmp_path, reference, cut_before(traced(reference), "mix"), replicas, "--epochs", "1", *options, **plan)
    ours, expected = trained(folder), on_whole_batches(name, 2)
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")

"""Weights of minibatches by the job's `loss_weight`; what they do to weights is in `test_semantics`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import state_jobs
import torch
from feature_workers import cut_before, run, traced
from torch import Tensor

from pipeplan_launch import Job, load_job
from pipeplan_launch.comm.gradient_exchange import choose_exchange
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.loss import weight_of
from pipeplan_launch.plan.run_options import Compression, GradientAveraging

torch.set_num_threads(1)


def test_losses_are_reported_as_means_over_valid_targets(tmp_path: Path) -> None:
    """Of both replicas together, as on the whole data at once; the weights do not change."""
    reference = f"{state_jobs.__file__}:padded"
    plan = {"schedule": "1f1b-flush", "accumulate": 2}
    folder = run(tmp_path, reference, cut_before(traced(reference), "last"), [1, 2], "--epochs", "1", **plan)
    job = load_job(reference, 0)
    (epoch,) = json.loads((folder / "summary.json").read_text())["epochs"]
    for name, samples in (("loss", job.datasets.train), ("test_loss", job.datasets.test)):
        assert job.loss is not None
        inputs, target = samples.tensors  # type: ignore[union-attr]
        assert epoch[name] == pytest.approx(job.loss(job.model(inputs), target).item(), rel=1e-12), name
    lines = [json.loads(line) for path in folder.glob("metrics/*.jsonl") for line in path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    assert losses.count(0.0) == 1, "one minibatch has no valid target"
    assert len(losses) == 7


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (torch.ones(2), r"must return one number, such as a count of targets, not a tensor of shape \(2,\)"),
        ("3", "must return one number, .*, not str"),
        (-1, "must return a number of at least 0, not -1"),
        (torch.tensor(float("nan")), "must return a number of at least 0, not nan"),
    ],
)
def test_what_a_weight_must_be(returned: Any, says: str) -> None:
    with pytest.raises(LaunchError, match=f"the job's loss_weight {says}"):
        weight_of(lambda _: returned, torch.ones(3))


@pytest.mark.parametrize("returned", [2, 0, 1.5, torch.tensor(2), torch.tensor([1.5]), torch.tensor(True)])
def test_what_a_weight_may_be(returned: float | Tensor) -> None:
    assert weight_of(lambda _: returned, None) == float(returned)


def test_a_job_takes_a_function() -> None:
    with pytest.raises(LaunchError, match="a job's loss_weight must be a function of the target: write loss_weight="):
        Job(torch.nn.Linear(2, 2), inputs=lambda n: torch.ones(n, 2), loss_weight=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("averaging", "option"),
    [
        (GradientAveraging(compression=Compression("powersgd")), "--compress powersgd"),
        (GradientAveraging(significance=0.01), "--significance"),
    ],
)
def test_an_exchange_that_holds_gradients_back_is_refused(averaging: GradientAveraging, option: str) -> None:
    given: Any = object()
    with pytest.raises(
        LaunchError, match=f"{option} holds parts of gradients back .* loss_weight: run with --compress"
    ):
        choose_exchange(averaging, given, 0, 0, given, given, weighted=True)

"""Traced programs by real workers: every kind of tensor across the cuts, autocast, recomputation, rates by stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from feature_workers import MINIBATCH, SAMPLES, cut_before, reference, run, traced, trained
from torch import Tensor

from pipeplan_launch import load_job
from pipeplan_launch.job.pass_conditions import autocast, mix_seed

torch.set_num_threads(1)
CPU = torch.device("cpu")


def orders(epochs: int) -> list[Tensor]:
    """The samples of each epoch, in their order."""
    return [
        torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mix_seed("order", 0, one)))
        for one in range(epochs)
    ]


def in_one_process(name: str, epochs: int) -> tuple[dict[str, Tensor], float, float, dict[str, float]]:
    """(state, test loss, right answers, other metrics) after an ordinary training loop."""
    job = load_job(reference(name), 0)
    model, data = job.model.train(), job.datasets
    optimizer = job.make_optimizer([one for one in model.parameters() if one.requires_grad])
    for order in orders(epochs):
        for chosen in order.split(MINIBATCH):
            inputs, target = data.train[chosen]
            optimizer.zero_grad()
            with autocast(job.autocast, CPU):
                loss = job.loss(model(inputs), target)
            loss.backward()
            optimizer.step()
    total, correct, others = 0.0, 0.0, dict.fromkeys(job.metrics, 0.0)
    with torch.no_grad():
        for start in range(0, SAMPLES, MINIBATCH):
            inputs, target = data.test[start : start + MINIBATCH]
            with autocast(job.autocast, CPU):
                output = model.eval()(inputs)
                total += float(job.loss(output, target)) * len(target)
            correct += float(job.metric(output, target))
            for name, metric in job.metrics.items():
                others[name] += float(metric(output, target)) * len(target) / SAMPLES
    return model.state_dict(), total / SAMPLES, correct, others


@pytest.mark.parametrize(
    ("name", "cuts", "replicas", "recompute"),
    [
        ("everything", ("stem", "late"), [1, 1, 1], False),
        pytest.param("half", ("middle", "norm"), [2, 1, 1], True, marks=pytest.mark.slow),
        pytest.param("everything", ("head",), [1, 2], True, marks=pytest.mark.slow),
    ],
)
def test_everything_crosses(
    tmp_path: Path, name: str, cuts: tuple[str, ...], replicas: list[int], recompute: bool
) -> None:
    """With a flush after every minibatch, training is that of one process; the last one has two samples of four."""
    stages = cut_before(traced(name), *cuts)
    flags = [recompute] * len(replicas)
    folder = run(
        tmp_path, name, stages, replicas, "--epochs", "2", schedule="1f1b-flush", accumulate=1, recompute=flags
    )
    expected, test_loss, correct, others = in_one_process(name, epochs=2)
    ours = trained(folder)
    assert ours.keys() == expected.keys()
    assert all(value.dtype == torch.float32 for value in ours.values())
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")
    last = json.loads((folder / "summary.json").read_text())["epochs"][-1]
    assert last["test_loss"] == pytest.approx(test_loss, rel=1e-6)
    assert last["test_accuracy"] == correct / SAMPLES
    assert last["test_metrics"] == pytest.approx(others, rel=1e-5)
    assert 0 < others["sure"] < 1


def test_what_crosses_those_cuts() -> None:
    """Whole numbers, truth values, and skips; nothing of a frozen stage gets a gradient."""
    plain, half = traced("everything"), traced("half")
    kinds = {spec.name: (spec.dtype, spec.requires_grad) for spec in plain.tensors}
    assert {(torch.int64, False), (torch.bool, False), (torch.float32, False), (torch.float32, True)} <= {
        *kinds.values()
    }
    assert (torch.bfloat16, True) in {(spec.dtype, spec.requires_grad) for spec in half.tensors}


@pytest.mark.parametrize(("name", "factor"), [pytest.param("line", 0.5, marks=pytest.mark.slow), ("scaled_line", 1.0)])
def test_how_far_an_epoch_moves_a_stage_with_two_replicas(tmp_path: Path, name: str, factor: float) -> None:
    """2-1 and plain SGD, with a loss that is linear in the first stage's weights.

    It makes half as many updates, each from the mean of two gradients. At the same rate an epoch moves it half as far
    as one process would, at twice the rate (`scale_lr="linear"`) just as far.
    """
    folder = run(tmp_path, name, cut_before(traced(name), "last"), [2, 1], "--epochs", "1", "--max-minibatches", "6")
    job = load_job(reference(name), 0)
    first, last = (job.model.state_dict()[f"{layer}.weight"] for layer in ("first", "last"))
    seen = job.datasets.train[orders(1)[0][:12]][0]
    moved = 0.1 * 6 * torch.outer(last[0], seen.mean(dim=0))
    torch.testing.assert_close(first - trained(folder)["first.weight"], factor * moved, rtol=1e-4, atol=1e-6)
    assert torch.equal(trained(folder)["last.weight"], last), "a stage whose parameters are all frozen"

"""Runs whose transfers are in the one order, over Gloo on the CPU: the same losses and weights, bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from extents import slow_but_for
from schedule_rules import TRAINING
from toy_workers import Toy, run_plan, stage_contents, write_plan

from pipeplan_launch.checkpoint import tensor_store
from pipeplan_launch.checkpoint.checkpoint import latest_checkpoint
from pipeplan_launch.checkpoint.manifest import MODEL_PREFIX

Trained = tuple[list[Any], dict[str, torch.Tensor]]


def trained(folder: Path, transport: str, replicas: list[int], toy: Toy, arguments: list[str], **plan: Any) -> Trained:
    """(losses of training and evaluation, weights and buffers) of a run."""
    write_plan(folder, stage_contents(replicas, **plan))
    run = folder / "run"
    arguments = ["--run-dir", str(run), "--transport", transport, "--timeout", "20", *arguments]
    ended = run_plan(folder, arguments, toy, sum(replicas))
    assert ended.statuses == [0] * sum(replicas), ended.err
    manifest = latest_checkpoint(run)
    assert manifest is not None
    names = [name for name in manifest.tensors if name.startswith(MODEL_PREFIX)]
    epochs = json.loads((run / "summary.json").read_text())["epochs"]
    return [(one["loss"], one["test_loss"]) for one in epochs], tensor_store.load_tensors(manifest, names)


def check_equal(tmp_path: Path, replicas: list[int], toy: Toy, arguments: list[str], **plan: Any) -> None:
    free = trained(tmp_path / "gloo", "gloo", replicas, toy, arguments, **plan)
    ordered = trained(tmp_path / "nccl", "nccl", replicas, toy, arguments, **plan)
    assert free[0] == ordered[0]
    assert free[1].keys() == ordered[1].keys()
    assert all(torch.equal(free[1][name], ordered[1][name]) for name in free[1])


@pytest.mark.parametrize("replicas", slow_but_for([[2, 1], [1, 1, 1]], [[1, 1], [1, 1, 1], [2, 1], [1, 3]]), ids=str)
def test_the_order_does_not_change_what_is_trained(tmp_path: Path, replicas: list[int]) -> None:
    """With a short last minibatch, tensors that skip a stage, whole numbers, dropout, buffers, and evaluation."""
    check_equal(tmp_path, replicas, Toy(samples=41), ["--epochs", "2", "--checkpoint-minibatches", "8"])


OTHER_SCHEDULES = [one.name for one in TRAINING if one.name != "1f1b-stashing"]


@pytest.mark.parametrize("name", slow_but_for(["2bw"], OTHER_SCHEDULES))
@pytest.mark.parametrize("replicas", slow_but_for([[1, 2]], [[1, 2], [2, 1]]), ids=str)
def test_every_schedule_runs_in_the_order(tmp_path: Path, name: str, replicas: list[int]) -> None:
    accumulate = 6 if name in ("2bw", "gpipe", "1f1b-flush", "zb-h1") else None
    plan: dict[str, Any] = {"schedule": name, "accumulate": accumulate}
    check_equal(tmp_path, replicas, Toy(samples=41), ["--epochs", "2"], **plan)


@pytest.mark.parametrize("recompute", slow_but_for([[True, False]], [[True, False], [True, True]]), ids=str)
def test_a_stage_that_recomputes_runs_in_the_order(tmp_path: Path, recompute: list[bool]) -> None:
    check_equal(tmp_path, [1, 2], Toy(), ["--epochs", "1"], recompute=recompute)


def test_a_lost_peer_is_named(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([1, 1]))
    arguments = ["--run-dir", str(tmp_path / "run"), "--timeout", "5", "--transport", "nccl"]
    ended = run_plan(tmp_path, arguments, Toy(die=(0, 3)), 2)
    assert ended.statuses[1] == 2
    waited = r"waited for the activations of minibatch \d from rank 0, which did not come"
    undelivered = r"could not deliver the gradients of minibatch \d to rank 0"
    assert re.search(rf"^error: stage 1 \(rank 1\) ({waited}|{undelivered}): ", ended.err, re.MULTILINE), ended.err


def test_compression_is_refused_where_one_thread_starts_everything(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([2, 1]))
    arguments = ["--run-dir", str(tmp_path / "run"), "--transport", "nccl", "--compress", "bf16"]
    ended = run_plan(tmp_path, arguments, Toy(), 3)
    assert 2 in ended.statuses
    assert "--transport nccl starts everything from one thread" in ended.err

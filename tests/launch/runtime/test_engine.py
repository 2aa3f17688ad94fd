"""The engine trains any number of minibatches on any workers as the formula says, evaluates, and resumes.

`test_semantics.py` has all schedules.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from extents import slow_but_for
from torch import Tensor
from torch.nn import functional
from toy_training import State, assert_close, train, train_literally, trained
from toy_workers import (
    Toy,
    run_layer,
    run_plan,
    samples,
    stage_contents,
    write_plan,
)


@pytest.mark.parametrize(
    ("replicas", "count", "dynamic"),
    [
        ([3, 2, 1], 25, True),
        pytest.param([1, 2, 3], 25, False, marks=pytest.mark.slow),
        pytest.param([3], 8, True, marks=pytest.mark.slow),
        ([2, 2], 3, True),
        pytest.param([3, 1], 2, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_number_of_minibatches(tmp_path: Path, replicas: list[int], count: int, dynamic: bool) -> None:
    """Short last groups, short last minibatches, fewer minibatches than replicas; two epochs, an idle worker."""
    toy = Toy("sgd-fused", samples=count, dynamic=dynamic)
    run = train(tmp_path, toy, replicas, "--epochs", "2", idle=1)
    weights, buffers = train_literally(toy, replicas, epochs=2)
    ours = trained(run)
    assert_close(ours[0], weights)
    assert_close(ours[1], buffers)


@pytest.mark.parametrize("workers", [[[0, 2], [1, 3]], [[3, 1], [4, 0]]], ids=["copies", "anyhow"])
def test_it_does_not_matter_which_workers(tmp_path: Path, workers: list[list[int]]) -> None:
    """Copies of a pipeline on either server, whose replicas lie apart; and no order at all, one worker idle."""
    toy, contents = Toy("sgd", samples=21), stage_contents([2, 2])
    for content in contents:
        content["pipeline"] = [
            stage | {"workers": chosen} for stage, chosen in zip(content["pipeline"], workers, strict=True)
        ]
        content["servers"], content["workers_per_server"] = 1, 5
    folder = write_plan(tmp_path, contents)
    ended = run_plan(folder, ["--run-dir", str(folder / "run"), "--epochs", "2"], toy, 5)
    assert ended.statuses == [0] * 5, ended.err
    for ours, theirs in zip(trained(folder / "run"), train_literally(toy, [2, 2], 2), strict=True):
        assert_close(ours, theirs)


def test_deeper_than_needed_is_staler(tmp_path: Path) -> None:
    """The depth in the plan decides, not what the schedule would need."""
    toy = Toy("sgd", samples=20)
    one = trained(train(tmp_path / "a", toy, [1, 1], "--epochs", "1", depth=[2, 1]))[0]
    other = trained(train(tmp_path / "b", toy, [1, 1], "--epochs", "1", depth=[4, 1]))[0]
    assert not torch.allclose(one["one.weight"], other["one.weight"])


def test_a_resumed_run_keeps_its_epochs_and_a_finished_one_its_files(tmp_path: Path) -> None:
    toy = Toy("sgd", samples=9)
    run = train(tmp_path, toy, [1, 1], "--epochs", "1")
    first = json.loads((run / "summary.json").read_text())["epochs"]
    train(tmp_path, toy, [1, 1], "--epochs", "2", "--resume")
    both = json.loads((run / "summary.json").read_text())["epochs"]
    assert [epoch["epoch"] for epoch in both] == [1, 2]
    assert both[:1] == first
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    ended = run_plan(tmp_path, ["--run-dir", str(run), "--epochs", "2", "--resume"], toy, 2)
    assert ended.statuses == [0, 0]
    assert ended.err.startswith("nothing left to do: ")
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}


def literal_score(weights: State, buffers: State, toy: Toy) -> tuple[int, float]:
    inputs, targets = samples(toy.samples + 23)
    inputs, targets = inputs[toy.samples :], targets[toy.samples :]
    given: tuple[Tensor, ...] = (inputs,)
    for layer in range(3):
        given = run_layer(layer, weights, buffers, given, False)
    return int((given[0].argmax(1) == targets).sum()), functional.cross_entropy(given[0], targets).item()


@pytest.mark.parametrize(("replicas", "dynamic"), [([2, 1], True), ([1, 2, 2], False)], ids=str)
def test_evaluation_counts_as_one_process_does(tmp_path: Path, replicas: list[int], dynamic: bool) -> None:
    """23 test samples in minibatches of 4: the last is short, or filled up and the filling not counted."""
    toy = Toy(dynamic=dynamic)
    run = train(tmp_path, toy, replicas, "--epochs", "1", minibatch=4)
    correct, loss = literal_score(*trained(run), toy)
    epoch = json.loads((run / "summary.json").read_text())["epochs"][-1]
    assert epoch["test_accuracy"] == correct / 23
    assert epoch["test_loss"] == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("replicas", slow_but_for([[2, 1]], [[1, 1, 1], [2, 1], [3]]), ids=str)
def test_inference_counts_as_one_process_does(tmp_path: Path, replicas: list[int]) -> None:
    toy = Toy()
    run = train(tmp_path / "train", toy, [2, 1], "--epochs", "1")
    correct, _ = literal_score(*trained(run), toy)
    folder = tmp_path / "infer"
    write_plan(folder, stage_contents(replicas, mode="inference", minibatch=4))
    ended = run_plan(folder, ["--run-dir", str(folder / "run"), "--weights", str(run)], toy, sum(replicas))
    assert ended.statuses == [0] * sum(replicas), ended.err
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["correct"], summary["samples"]) == (correct, 23)
    assert f"({correct} of 23)" in ended.out

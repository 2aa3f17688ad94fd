"""The user's training by real workers: clipping, schedulers, rates by stage, samplers, callbacks, scores."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from extents import slow_but_for
from torch.nn import functional
from torch.optim import SGD
from toy_jobs import by_rule, diary
from toy_training import assert_close, train, train_literally, trained
from toy_workers import OPTIMIZERS, Toy, run_layer, run_plan, run_toy, samples, stage_contents, write_plan

from pipeplan_launch.checkpoint.checkpoint import complete_checkpoints

torch.set_num_threads(1)


def test_any_workers_may_run_any_stage(tmp_path: Path) -> None:
    """In no order, one of them idle. Without a flush each stage limits the norm of its own gradients, and says so."""
    toy, contents = Toy("sgd", samples=21, features="clip"), stage_contents([2, 2])
    for content in contents:
        for stage, workers in zip(content["pipeline"], [[3, 1], [4, 0]], strict=True):
            stage["workers"] = workers
        content["workers_per_server"] = 5
    write_plan(tmp_path, contents)
    ended = run_plan(tmp_path, ["--run-dir", str(tmp_path / "run"), "--epochs", "2"], toy, 5)
    assert ended.statuses == [0] * 5, ended.err
    assert ended.err.count("limits the norm of each stage by itself") == 1
    for ours, theirs in zip(trained(tmp_path / "run"), train_literally(toy, [2, 2], 2), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("dynamic", slow_but_for([False], [False, True]))
def test_evaluation_and_inference_count_as_one_process_does(tmp_path: Path, dynamic: bool) -> None:
    """23 test samples in minibatches of 4: the last is short, or filled up and the filling not counted."""
    toy = Toy(dynamic=dynamic)
    replicas, inference = ([2, 1], [1, 1, 1]) if dynamic else ([1, 2, 2], [2, 1])
    run = train(tmp_path / "train", toy, replicas, "--epochs", "1", minibatch=4)
    inputs, targets = (tensor[toy.samples :] for tensor in samples(toy.samples + 23))
    (weights, buffers), given = trained(run), (inputs,)
    for layer in range(3):
        given = run_layer(layer, weights, buffers, given, False)
    correct = int((given[0].argmax(1) == targets).sum())
    epoch = json.loads((run / "summary.json").read_text())["epochs"][-1]
    assert epoch["test_accuracy"] == correct / 23
    assert epoch["test_loss"] == pytest.approx(functional.cross_entropy(given[0], targets).item(), rel=1e-9)
    folder = tmp_path / "infer"
    ended = run_toy(folder, toy, inference, "--weights", str(run), mode="inference", minibatch=4)
    assert ended.statuses == [0] * sum(inference), ended.err
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["correct"], summary["samples"]) == (correct, 23)
    assert f"({correct} of 23)" in ended.out


class ByRule(SGD):
    """SGD with momentum, whose rate is that of the first minibatch of an update of so many."""

    def __init__(self, parameters: Any, size: int, rate: float = 0.2) -> None:
        super().__init__(parameters, lr=rate, momentum=0.9, foreach=False)
        self.rates = (rate * by_rule(minibatch) for minibatch in count(0, size))

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = next(self.rates)
        return super().step(closure)


def rates(run: Path) -> list[float]:
    return [content["learning_rate"] for what, content in diary(run) if what == "minibatch"]


def test_a_scheduler_follows_the_minibatches_of_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2-1: the first stage makes half as many updates, and has the same rate for the same minibatch."""
    toy, replicas = Toy("sgd", samples=32, features="lambda"), [2, 1]
    run = train(tmp_path, toy, replicas, "--epochs", "2")
    sizes = iter(replicas)
    monkeypatch.setitem(OPTIMIZERS, "sgd", lambda parameters: ByRule(parameters, next(sizes)))
    weights, _ = train_literally(toy, replicas, 2)
    assert_close(trained(run)[0], weights)
    assert rates(run) == pytest.approx([0.2 * by_rule(minibatch) for minibatch in range(32)])


def assert_equal(one: Path, other: Path) -> None:
    """Bit by bit, what two runs have trained."""
    for ours, theirs in zip(trained(one), trained(other), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("features", slow_but_for(["sequence"], ["sequence", "plateau"]))
def test_a_run_that_goes_on_equals_one_that_was_not_interrupted(tmp_path: Path, features: str) -> None:
    """From the middle of the last epoch, bit by bit."""
    toy, every = Toy("sgd", samples=30, features=features), ["--epochs", "3", "--checkpoint-minibatches", "9"]
    whole = train(tmp_path / "whole", toy, [2, 1], *every)
    middle = complete_checkpoints(whole)[-2]
    part = train(tmp_path / "part", toy, [2, 1], *every, "--resume-from", str(middle))
    assert_equal(part, whole)
    assert rates(part) == rates(whole)[-len(rates(part)) :]
    assert 0 < len(rates(part)) < 15
    assert len(set(rates(whole))) > 1


def test_a_run_that_goes_on_under_another_plan_has_that_plans_rates(tmp_path: Path) -> None:
    """From 1-2 to 2-1 in mid-epoch: the scaled rate of the last stage is halved, the schedule goes on."""
    toy, every = Toy("sgd", samples=30, features="lambda-scaled"), ["--epochs", "2", "--checkpoint-minibatches", "10"]
    whole = train(tmp_path / "whole", toy, [1, 2], *every)
    middle = complete_checkpoints(whole)[-2]
    part = train(tmp_path / "part", toy, [2, 1], *every, "--resume-from", str(middle))
    # An update's rate is that of its first minibatch, which replica 0 of the last stage had.
    firsts = [minibatch for start in (0, 15) for minibatch in range(start, start + 15, 2)]
    assert rates(whole) == pytest.approx([2 * 0.1 * by_rule(minibatch) for minibatch in firsts])
    assert rates(part) == pytest.approx([0.1 * by_rule(minibatch) for minibatch in range(25, 30)])


def test_a_sampler_of_the_users_own_and_reading_ahead(tmp_path: Path) -> None:
    """Thirteen of forty samples an epoch, drawn by torch's sampler; with processes that read ahead it trains the same.

    The epoch has two segments, and the workers that read targets are not those that read inputs.
    """
    options = ["--epochs", "2", "--checkpoint-minibatches", "5"]
    plain, ahead = (
        train(tmp_path / features, Toy("sgd", features=features), [2, 1], *options)
        for features in ("weighted", "weighted-ahead")
    )
    told = [content for what, content in diary(plain) if what == "minibatch"]
    assert [content["samples"] for content in told] == [2, 2, 2, 2, 2, 2, 1] * 2
    assert told[0]["loss"] != told[7]["loss"]
    assert_equal(plain, ahead)


def test_what_callbacks_are_told(tmp_path: Path) -> None:
    """In one process, in order: of all minibatches of the first replica of the last stage."""
    run = train(tmp_path, Toy(samples=11, features="diary"), [1, 2], "--epochs", "2", "--evaluate-every", "2")
    told = diary(run)
    epoch = ["minibatch"] * 3 + ["checkpoint", "epoch"]
    assert [what for what, _ in told] == ["start", *epoch, *epoch, "end"]
    start = told[0][1]
    assert (start["plan"], start["minibatch"], start["epochs"], start["minibatches"]) == ("1-2", 2, 2, 6)
    seen = [
        (content["epoch"], content["minibatch"], content["samples"]) for what, content in told if what == "minibatch"
    ]
    assert seen == [(epoch, minibatch, 2) for epoch in (0, 1) for minibatch in (0, 2, 4)]
    assert all(content["loss"] > 0 and content["learning_rate"] == 0.2 for what, content in told if what == "minibatch")
    first, second = [content for what, content in told if what == "epoch"]
    assert (first["epoch"], first["test_loss"], second["epoch"]) == (1, None, 2)
    assert second["test_loss"] > 0
    assert told[-1][1]["epochs"] == [first, second]


def test_a_callback_that_fails_is_one_line(tmp_path: Path) -> None:
    ended = run_toy(tmp_path, Toy(features="spoilsport"), [1, 1], "--epochs", "1")
    assert 2 in ended.statuses
    says = "the job's callback Spoilsport.on_epoch failed: OSError: the log's disk is full"
    assert [line for line in ended.err.splitlines() if line.startswith("error:") and says in line]
    assert "Traceback" not in ended.err

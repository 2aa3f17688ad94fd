"""The user's training by real workers: clipping, schedulers, rates by stage, callbacks."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from toy_jobs import LIMIT, by_rule, diary
from toy_training import State, assert_close, train, train_literally, trained
from toy_workers import (
    OPTIMIZERS,
    Toy,
    initial,
    initial_buffers,
    run_layer,
    run_plan,
    samples,
    split_layers,
    stage_contents,
    write_plan,
)

from pipeplan_launch.checkpoint.checkpoint import complete_checkpoints
from pipeplan_launch.job.pass_conditions import mix_seed, seed_forward

torch.set_num_threads(1)


def train_whole(toy: Toy, replicas: list[int], accumulate: int, limit: float) -> tuple[State, list[float]]:
    """(weights, norms) of one process that trains the model as a whole and clips it with torch's own function.

    `replicas` only say where the seed of dropout changes, and which minibatches share buffers.
    """
    live = {name: nn.Parameter(weight) for layer in initial() for name, weight in layer.items()}
    buffers = [
        [{n: b.clone() for one in initial_buffers() for n, b in one.items()} for _ in range(r)] for r in replicas
    ]
    optimizer, norms = OPTIMIZERS[toy.optimizer](list(live.values())), []
    inputs, targets = samples(toy.samples + toy.test_samples)
    chunks = torch.randperm(toy.samples, generator=torch.Generator().manual_seed(mix_seed("order", 0, 0))).split(2)
    for start in range(0, len(chunks), accumulate):
        group = chunks[start : start + accumulate]
        optimizer.zero_grad()
        for number, chunk in enumerate(group, start):
            given: tuple[torch.Tensor, ...] = (inputs[chunk],)
            for stage, layers in enumerate(split_layers(len(replicas))):
                seed_forward(0, 0, number, stage)
                for layer in layers:
                    given = run_layer(layer, live, buffers[stage][number % replicas[stage]], given, True)
            loss = functional.cross_entropy(given[0], targets[chunk])
            (loss * len(chunk) / sum(map(len, group))).backward()
        norms.append(float(clip_grad_norm_(live.values(), limit)))
        optimizer.step()
    return {name: weight.detach() for name, weight in live.items()}, norms


@pytest.mark.parametrize(
    ("schedule", "replicas"), [pytest.param("gpipe", [1, 1, 1], marks=pytest.mark.slow), ("1f1b-flush", [2, 1])]
)
def test_with_a_flush_the_norm_is_that_of_the_whole_model(tmp_path: Path, schedule: str, replicas: list[int]) -> None:
    """Against `clip_grad_norm_` in one process, in 64-bit numbers; the last group is short, and so its last member."""
    toy = Toy("adamw-fused", samples=43, features="clip")
    run = train(tmp_path, toy, replicas, "--epochs", "1", schedule=schedule, accumulate=4)
    weights, norms = train_whole(toy, replicas, 4, LIMIT)
    assert min(norms) > 2 * LIMIT, "every update is clipped"
    assert_close(trained(run)[0], weights)


class Clipped(SGD):
    """Clips what it is given by its own norm, before every step."""

    def step(self, closure: Any = None) -> Any:
        clip_grad_norm_([one for group in self.param_groups for one in group["params"]], LIMIT)
        return super().step(closure)


@pytest.mark.parametrize(("schedule", "accumulate"), [("1f1b-stashing", None), ("2bw", 4)])
def test_without_a_flush_each_stage_has_its_own_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, accumulate: int | None
) -> None:
    toy, replicas = Toy("sgd", samples=43, features="clip"), [2, 1]
    write_plan(tmp_path, stage_contents(replicas, schedule=schedule, accumulate=accumulate))
    ended = run_plan(tmp_path, ["--run-dir", str(tmp_path / "run"), "--epochs", "1"], toy, 3)
    assert ended.statuses == [0] * 3, ended.err
    assert ended.err.count("limits the norm of each stage by itself") == 1
    monkeypatch.setitem(OPTIMIZERS, "sgd", lambda parameters: Clipped(parameters, lr=0.2, momentum=0.9, foreach=False))
    weights, _ = train_literally(toy, replicas, 1, schedule=schedule, accumulate=accumulate)
    assert_close(trained(tmp_path / "run")[0], weights)


class ByRule(SGD):
    """Plain SGD whose rate is that of the first minibatch of an update of so many."""

    def __init__(self, parameters: Any, size: int, rate: float = 0.2) -> None:
        super().__init__(parameters, lr=rate, momentum=0.9, foreach=False)
        self.rates = (rate * by_rule(minibatch) for minibatch in count(0, size))

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = next(self.rates)
        return super().step(closure)


def test_a_scheduler_follows_the_minibatches_of_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2-1: the first stage makes half as many updates, and has the same rate for the same minibatch."""
    toy, replicas = Toy("sgd", samples=32, features="lambda"), [2, 1]
    run = train(tmp_path, toy, replicas, "--epochs", "2")
    sizes = iter(replicas)
    monkeypatch.setitem(OPTIMIZERS, "sgd", lambda parameters: ByRule(parameters, next(sizes)))
    weights, _ = train_literally(toy, replicas, 2)
    assert_close(trained(run)[0], weights)
    told = [content["learning_rate"] for what, content in diary(run) if what == "minibatch"]
    assert told == pytest.approx([0.2 * by_rule(minibatch) for minibatch in range(32)])


RESUMED = ("sequence", pytest.param("plateau", marks=pytest.mark.slow))


@pytest.mark.parametrize("features", RESUMED)
def test_a_run_that_goes_on_equals_one_that_was_not_interrupted(tmp_path: Path, features: str) -> None:
    """From the middle of the last epoch, bit by bit."""
    toy, every = Toy("sgd", samples=30, features=features), ["--checkpoint-minibatches", "9"]
    whole = train(tmp_path / "whole", toy, [2, 1], "--epochs", "3", *every)
    middle = complete_checkpoints(whole)[-2]
    part = train(tmp_path / "part", toy, [2, 1], "--epochs", "3", *every, "--resume-from", str(middle))
    for ours, theirs in zip(trained(part), trained(whole), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert rates(part) == rates(whole)[-len(rates(part)) :]
    assert 0 < len(rates(part)) < 15
    assert len(set(rates(whole))) > 1


def rates(run: Path) -> list[float]:
    return [content["learning_rate"] for what, content in diary(run) if what == "minibatch"]


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


def test_reading_ahead_changes_nothing(tmp_path: Path) -> None:
    """Also where an epoch runs in several segments, and where targets and inputs are read by different workers."""
    left = []
    for features in ("", "ahead"):
        toy, options = Toy("sgd", samples=15, features=features), ["--epochs", "1", "--checkpoint-minibatches", "5"]
        left.append(trained(train(tmp_path / f"run-{features}", toy, [2, 1], *options)))
    for plain, ahead in zip(*left, strict=True):
        assert plain.keys() == ahead.keys()
        assert all(torch.equal(value, ahead[name]) for name, value in plain.items())


def test_a_sampler_of_the_users_own(tmp_path: Path) -> None:
    """Thirteen of forty samples an epoch, drawn by torch's sampler, the same at the stage of inputs and of targets."""
    whole, again = (train(tmp_path / name, Toy("sgd", features="weighted"), [2, 1], "--epochs", "2") for name in "ab")
    told = [content for what, content in diary(whole) if what == "minibatch"]
    assert [content["samples"] for content in told] == [2, 2, 2, 2, 2, 2, 1] * 2
    assert told[0]["loss"] != told[7]["loss"]
    for one, other in zip(trained(whole), trained(again), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


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


@pytest.mark.parametrize(
    ("features", "says"),
    [
        ("spoilsport", "the job's callback Spoilsport.on_epoch failed: OSError: the log's disk is full"),
        ("plateau-minibatch", "ReduceLROnPlateau follows the test loss, once an epoch"),
        ("too-short", "the job's scheduler failed: ValueError: Tried to step 6 times"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, features: str, says: str) -> None:
    write_plan(tmp_path, stage_contents([1, 1]))
    ended = run_plan(tmp_path, ["--run-dir", str(tmp_path / "run"), "--epochs", "1"], Toy(features=features), 2)
    assert 2 in ended.statuses
    assert [line for line in ended.err.splitlines() if line.startswith("error:") and says in line]
    assert "Traceback" not in ended.err

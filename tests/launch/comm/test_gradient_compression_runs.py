"""Whole runs whose replicas compress their gradients, or filter them between servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extents import slow_but_for
from replicas import run
from torch import Tensor, nn
from toy_training import State, assert_close, train_literally, trained
from toy_workers import Toy, run_plan, stage_contents, write_plan

from pipeplan_launch.__main__ import options_from
from pipeplan_launch.comm import gradient_exchange
from pipeplan_launch.comm.buckets import UpdateGroup
from pipeplan_launch.comm.gradient_allreduce import GradientReducer
from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.errors import PeerLost
from pipeplan_launch.plan.run_options import Compression, GradientAveraging
from pipeplan_launch.plan.stage_files import load_plan


def apart(world: int) -> dict[str, Any]:
    """Two servers, the first with one worker."""
    return {"servers": 2, "workers_per_server": world - 1, "server_sizes": [1, world - 1]}


def train(folder: Path, toy: Toy, replicas: list[int], *arguments: str) -> State:
    """The weights after training; the first worker has a server to itself."""
    world = sum(replicas)
    write_plan(folder, [content | apart(world) for content in stage_contents(replicas)])
    ended = run_plan(folder, ["--run-dir", str(folder / "run"), *arguments], toy, world)
    assert ended.statuses == [0] * world, ended.err
    return trained(folder / "run")[0]


@pytest.mark.parametrize("replicas", slow_but_for([[2, 1]], [[2], [3], [2, 1]]), ids=str)
def test_a_threshold_of_nothing_lets_everything_through(tmp_path: Path, replicas: list[int]) -> None:
    toy = Toy("sgd-fused", samples=33)
    ours = train(tmp_path, toy, replicas, "--epochs", "2", "--significance", "0")
    assert_close(ours, train_literally(toy, replicas, epochs=2)[0])


def test_bf16_trains_to_about_the_same(tmp_path: Path) -> None:
    toy = Toy("sgd-fused", samples=33)
    ours = train(tmp_path, toy, [2, 1], "--epochs", "2", "--compress", "bf16")
    exact = train_literally(toy, [2, 1], epochs=2)[0]
    distance = {name: float((value - exact[name]).norm() / exact[name].norm()) for name, value in ours.items()}
    assert max(distance.values()) < 0.05
    assert distance["one.weight"] > 1e-5, "it is not exact"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "option"),
    [
        ([2], ("--compress", "bf16")),
        ([2], ("--compress", "powersgd:1:0")),
        ([2, 1], ("--compress", "powersgd:2:3")),
        ([3], ("--significance", "20%")),
        ([2, 1], ("--significance", "20%")),
    ],
    ids=str,
)
def test_what_is_held_back_does_not_matter_to_a_checkpoint(
    tmp_path: Path, replicas: list[int], option: tuple[str, str]
) -> None:
    """Bit by bit, a run that goes on after one of its checkpoints, within an epoch, equals one that was not stopped."""
    toy = Toy("adamw-fused", samples=61)
    always = ("--checkpoint-minibatches", "12", *option)
    straight = train(tmp_path / "straight", toy, replicas, "--epochs", "2", *always)
    stopped = tmp_path / "stopped"
    train(stopped, toy, replicas, "--epochs", "1", *always)
    resumed = train(stopped, toy, replicas, "--epochs", "2", "--resume", *always)
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
    exact = train_literally(toy, replicas, epochs=2)[0]
    assert any(not torch.allclose(value, exact[name], rtol=1e-6) for name, value in straight.items())


def test_options_mean() -> None:
    for option, meant in (
        (["--compress", "bf16"], GradientAveraging(Compression("bf16"))),
        (["--compress", "powersgd"], GradientAveraging(Compression("powersgd", 1, 10))),
        (["--compress", "powersgd:4"], GradientAveraging(Compression("powersgd", 4, 10))),
        (["--compress", "powersgd:4:0"], GradientAveraging(Compression("powersgd", 4, 0))),
        (["--significance", "1%"], GradientAveraging(significance=0.01)),
        (["--significance", "0.5"], GradientAveraging(significance=0.5)),
        ([], GradientAveraging()),
    ):
        assert options_from(["plan", *option]).averaging == meant


def test_options_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for option, complaint in (
        (["--compress", "zip"], "'zip' is neither bf16 nor powersgd"),
        (["--compress", "powersgd:0"], "'powersgd:0' is neither"),
        (["--compress", "powersgd:x"], "'powersgd:x' is neither"),
        (["--significance", "100%"], "'100%' is not a share"),
        (["--significance", "nan"], "'nan' is not a share"),
        (["--significance", "-1%"], "expected one argument"),
        (["--significance", "1%", "--compress", "bf16"], "not allowed with argument"),
    ):
        with pytest.raises(SystemExit) as ended:
            options_from(["plan", *option])
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err


def test_an_option_that_changes_nothing_is_said(tmp_path: Path) -> None:
    compressed, filtered = GradientAveraging(Compression("bf16")), GradientAveraging(significance=0.1)
    for number, (replicas, averaging, said) in enumerate(
        (
            ([1, 1, 1], compressed, "--compress changes nothing"),
            ([2, 1], compressed, None),
            ([1, 2], filtered, "--significance changes nothing"),
            ([2, 1], filtered, None),
            ([1, 1, 1], GradientAveraging(), None),
        )
    ):
        contents = [content | apart(sum(replicas)) for content in stage_contents(replicas)]
        plan = load_plan(write_plan(tmp_path / str(number), contents))
        noted = gradient_exchange.note_on_unused_option(averaging, plan)
        assert noted is None if said is None else said in str(noted)


def break_off(rank: int, folder: Path) -> None:
    """Replica 1 fails in the middle of a backward, when its first bucket is on its way."""
    first, last = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    parameters = {"first": first, "last": last}

    def fail(_: Tensor) -> Tensor:
        raise ValueError("the model's own")

    reducer = GradientReducer(parameters, dist.group.WORLD, bucket_bytes=1)  # type: ignore[arg-type]
    said = ""
    try:
        with peer_loss_explained("the gradients did not come"), reducer.backward(parameters, 1.0, UpdateGroup(2.0)):
            hidden = first * 2
            if rank == 1:
                hidden.register_hook(fail)
            (hidden * last).sum().backward()
        with peer_loss_explained("the gradients did not come"):
            reducer.start(UpdateGroup(2.0))
            reducer.finish()
    except (PeerLost, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    torch.save(said, folder / f"result-{rank}.pt")
    os._exit(0)


def test_an_error_in_the_middle_of_backward_ends_the_others_too(tmp_path: Path) -> None:
    said = run(2, break_off, tmp_path, tmp_path)
    assert said[1] == "ValueError: the model's own"
    assert said[0].startswith("PeerLost: the gradients did not come")

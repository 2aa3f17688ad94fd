"""What goes wrong comes out as one line from one worker, with status 2, and nobody hangs."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from extents import slow_but_for
from launching import curve
from toy_workers import Toy, run_plan, stage_contents, write_plan
from worker_host import Ended

from pipeplan_launch.checkpoint.checkpoint import latest_checkpoint
from pipeplan_launch.command_line import worker_parser


def run(folder: Path, replicas: list[int], toy: Toy, *options: str, **plan: Any) -> Ended:
    write_plan(folder, stage_contents(replicas, **plan))
    given = ["--run-dir", str(folder / "run"), "--log-every", "0", *options]
    return run_plan(folder, given, toy, sum(replicas) + plan.get("idle", 0))


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_an_error_of_one_worker_is_said_once(tmp_path: Path) -> None:
    ended = run(tmp_path, [2, 1], Toy(fail_rank=2), idle=1)
    assert ended.statuses == [2, 2, 2, 2]
    assert ended.err.splitlines() == ["error: rank 2 cannot load"]
    assert not (tmp_path / "run" / "checkpoints").exists()


AT = r"at stage {0} \(rank {0}\), minibatch {1}, failed: ValueError: bad"
FAILURES: dict[str, tuple[list[int], Toy, str]] = {
    "a dead first stage": ([1, 1, 1], Toy(die=(0, 3)), ".* minibatch .*(from|to) rank 0"),
    "a dead last stage": ([1, 1, 1], Toy(die=(2, 0)), ".* minibatch .*(from|to) rank 2"),
    "a dead replica": (
        [2],
        Toy(die=(1, 3)),
        r"stage 0 \(rank 0\) could not average the gradients of group 3 with ranks \[1\]",
    ),
    "a loss that fails": (
        [1, 1],
        Toy(loss="broken"),
        r"the job's loss \(broken_loss\) at stage 1 \(rank 1\), minibatch 0, failed: RuntimeError: shape.*reshape\(3",
    ),
    **{
        f"a loss for each sample, {loss}": (
            [1],
            Toy(loss=loss),
            r"the job's loss \(lambda of .*must return a tensor with one number, the mean over the minibatch",
        )
        for loss in ("each-trained", "each-judged")
    },
    "a loss that trains nothing": (
        [1, 1],
        Toy(loss="detached"),
        ".*does not depend on any parameter that can be trained$",
    ),
    "forward": ([1, 1], Toy(fault=("forward", 0, 3)), "the model's forward " + AT.format(0, 3)),
    "backward": ([1, 1], Toy(fault=("backward", 1, 2)), "the model's backward " + AT.format(1, 2)),
    "step": ([1, 1], Toy(fault=("step", 0, 0)), "the optimizer's step " + AT.format(0, 0)),
    "metric": ([1, 1], Toy(fault=("metric", 1, 0)), "the job's metric " + AT.format(1, 0)),
    "vector": ([1, 1], Toy(fault=("vector", 1, 0)), "the job's metric must return one number"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    """Faults of the user's code name stage and minibatch."""
    replicas, toy, says = FAILURES[name]
    ended = run(tmp_path, replicas, toy, "--epochs", "1", "--timeout", "20")
    dead = None if toy.die is None else toy.die[0]
    assert ended.statuses == [9 if rank == dead else 2 for rank in range(sum(replicas))]
    assert "Traceback" not in ended.err
    (line,) = errors(ended.err)
    assert re.match("error: " + says, line), line
    assert (tmp_path / "run" / "error.txt").read_text().strip() == line.removeprefix("error: ")


def test_a_frozen_peer_is_given_up_on(tmp_path: Path) -> None:
    ended = run(tmp_path, [1, 1], Toy(die=(0, 3), freeze=True), "--timeout", "1")
    assert ended.statuses[1] == 2
    (line,) = errors(ended.err)
    assert "stage 1 (rank 1) waited for the activations of minibatch 3 from rank 0, which did not come" in line


def test_a_wrong_number_of_workers_is_refused(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([1, 1, 1]))
    ended = run_plan(tmp_path, [], Toy(), 2)
    assert ended.statuses == [2, 2]
    (line,) = errors(ended.err)
    assert line.startswith(f"error: the plan has 3 workers, and 2 were started, 2 on {platform.node()}: run its launch")


@pytest.mark.parametrize(
    "case", slow_but_for([([2, 1], [1])], [([2, 1], [1]), ([1, 1], [0, 1]), ([1, 1], [0]), ([1], [0])]), ids=str
)
def test_a_signal_to_some_stops_all_at_a_checkpoint(tmp_path: Path, case: tuple[list[int], list[int]]) -> None:
    """Worker 0 is idle. One line says where training stopped, and --resume goes on from there."""
    (replicas, signalled), folder = case, tmp_path / "run"
    options = ["--checkpoint-minibatches", "3", "--epochs"]
    watcher = multiprocessing.get_context("fork").Process(target=_interrupt, args=(str(folder), signalled))
    watcher.start()
    ended = run(tmp_path, replicas, Toy(), *options, "1000000", idle=1)
    watcher.join()
    assert {*ended.statuses} == {0}, ended.err
    (line,) = [line for line in ended.err.splitlines() if "--resume" in line]
    last = latest_checkpoint(folder)
    assert last is not None
    at = last.position
    assert line == f"stopped after {at}: --resume goes on from there"
    assert "Traceback" not in ended.err
    assert not errors(ended.err)
    stopped = json.loads((folder / "summary.json").read_text())["stopped"]
    assert stopped == {"epoch": at.epoch, "minibatch": at.minibatch}
    before = curve(folder)
    assert len(before) == 20 * at.epoch + at.minibatch
    ended = run(tmp_path, replicas, Toy(), *options, str(at.epoch + 2), "--resume", idle=1)
    assert {*ended.statuses} == {0}, ended.err
    after = curve(folder)
    assert len(after) == 20 * (at.epoch + 2)
    assert after | before == after


def _interrupt(run: str, signalled: list[int]) -> None:
    """When the first checkpoint is there, interrupt the workers, whose process ids are beside their logs."""
    while not list(Path(run).glob("checkpoints/*/manifest.json")):
        time.sleep(0.01)
    for rank in signalled:
        os.kill(int((Path(run).parent / f"worker-{rank}.pid").read_text()), signal.SIGINT)


def test_what_nobody_foresaw_is_one_line_and_a_traceback_in_the_run_folder(tmp_path: Path) -> None:
    ended = run(tmp_path, [1, 1], Toy(fault=("load", 1, 0)))
    assert ended.statuses == [2, 1]
    (line,) = ended.err.splitlines()
    assert line.startswith("error: something failed unexpectedly (rank 1, stage 1): ValueError: bad ")
    assert "Traceback" in (tmp_path / "run" / "errors" / "rank-1.txt").read_text()


def test_options_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value, says in (("--seed", 2**63, f"more than {2**63 - 1}"), ("--threads", 4097, "more than 4096")):
        with pytest.raises(SystemExit):
            worker_parser("prog").parse_args(["plan", option, str(value)])
        assert says in capsys.readouterr().err
    assert worker_parser("prog").parse_args(["plan", "--seed", str(2**63 - 1)]).seed == 2**63 - 1


def test_an_empty_test_set_is_none_in_training(tmp_path: Path) -> None:
    ended = run(tmp_path, [1, 1], Toy(test_samples=0), "--epochs", "1")
    assert ended.statuses == [0, 0], ended.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"][0]["test_accuracy"] is None
    ended = run(tmp_path / "inference", [1], Toy(test_samples=0), mode="inference")
    assert errors(ended.err) == ["error: the job's test data is empty"]

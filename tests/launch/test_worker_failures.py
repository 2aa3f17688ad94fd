"""What goes wrong comes out as one line from one worker, with status 2, and nobody hangs."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import signal
import time
from pathlib import Path

import pytest
from launching import curve
from saved import rewrite
from toy_workers import Toy, run_plan, stage_contents, write_plan

from pipeplan_launch.checkpoint.checkpoint import latest_checkpoint
from pipeplan_launch.command_line import worker_parser


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_an_error_of_one_worker_is_said_once(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([2, 1], idle=1))
    ended = run_plan(tmp_path, ["--run-dir", str(tmp_path / "run")], Toy(fail_rank=2), 4)
    assert ended.statuses == [2, 2, 2, 2]
    assert ended.err.splitlines() == ["error: rank 2 cannot load"]
    assert not (tmp_path / "run" / "checkpoints").exists()


def failed(folder: Path, replicas: list[int], toy: Toy, *options: str, statuses: list[int] | None = None) -> str:
    """The one line of a run that fails, by default with status 2 in all workers."""
    write_plan(folder, stage_contents(replicas))
    ended = run_plan(folder, ["--run-dir", str(folder / "run"), *options], toy, sum(replicas))
    assert ended.statuses == (statuses or [2] * sum(replicas))
    assert "Traceback" not in ended.err
    (line,) = errors(ended.err)
    return line.removeprefix("error: ")


ONE_EPOCH = ("--epochs", "1")


@pytest.mark.parametrize("die", [(0, 3), (2, 0), (1, 1)], ids=str)
def test_a_dead_peer_is_named(tmp_path: Path, die: tuple[int, int]) -> None:
    statuses = [9 if rank == die[0] else 2 for rank in range(3)]
    line = failed(tmp_path, [1, 1, 1], Toy(die=die), *ONE_EPOCH, statuses=statuses)
    assert "minibatch" in line
    assert "from rank" in line or "to rank" in line
    assert (tmp_path / "run" / "error.txt").read_text().strip() == line


def test_the_users_mistake_is_quoted(tmp_path: Path) -> None:
    line = failed(tmp_path, [1, 1], Toy(loss="broken"))
    where = "the job's loss (broken_loss) at stage 1 (rank 1), minibatch 0, failed: RuntimeError: shape"
    assert line.startswith(where)
    assert "toy_jobs.py:" in line
    assert "return output + target.reshape(3, 7)" in line


@pytest.mark.parametrize("loss", ["each-trained", "each-judged"])
def test_a_loss_for_each_sample_is_named(tmp_path: Path, loss: str) -> None:
    """In training, and in the evaluation after an epoch."""
    line = failed(tmp_path, [1], Toy(loss=loss), *ONE_EPOCH)
    assert line.startswith("the job's loss (lambda of ")
    assert "must return a tensor with one number, the mean over the minibatch, not one of shape (" in line


def test_a_loss_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    line = failed(tmp_path, [1, 1], Toy(loss="detached"), *ONE_EPOCH)
    assert line.endswith("does not depend on any parameter that can be trained")


def test_a_frozen_peer_is_given_up_on(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([1, 1]))
    ended = run_plan(tmp_path, ["--run-dir", str(tmp_path / "run"), "--timeout", "1"], Toy(die=(0, 3), freeze=True), 2)
    assert ended.statuses[1] == 2
    (line,) = errors(ended.err)
    assert "stage 1 (rank 1) waited for the activations of minibatch 3 from rank 0, which did not come" in line


def test_a_lost_replica_is_named(tmp_path: Path) -> None:
    line = failed(tmp_path, [2], Toy(die=(1, 3)), "--timeout", "20", statuses=[2, 9])
    assert "stage 0 (rank 0) could not average the gradients of group 3 with ranks [1]" in line


def test_refusals_before_anything_runs(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([1, 1]))
    run = str(tmp_path / "run")
    for arguments, message in (
        (["--resume"], "no run with a complete checkpoint"),
        (["--resume", "--run-dir", run], "no complete checkpoint to resume from"),
        (["--weights", str(tmp_path)], "neither a checkpoint nor a run folder"),
    ):
        ended = run_plan(tmp_path, arguments, Toy(), 2)
        assert ended.statuses == [2, 2]
        (line,) = errors(ended.err)
        assert message in line


def test_a_wrong_number_of_workers_is_refused(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([1, 1, 1]))
    ended = run_plan(tmp_path, [], Toy(), 2)
    assert ended.statuses == [2, 2]
    (line,) = errors(ended.err)
    assert line.startswith(f"error: the plan has 3 workers, and 2 were started, 2 on {platform.node()}: run its launch")


def test_a_run_folder_is_not_run_into_twice(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([1]))
    arguments = ["--run-dir", str(tmp_path / "run"), "--epochs", "1"]
    assert run_plan(tmp_path, arguments, Toy(), 1).statuses == [0]
    ended = run_plan(tmp_path, arguments, Toy(), 1)
    assert ended.statuses == [2]
    assert "already holds a run" in ended.err
    ended = run_plan(tmp_path, [*arguments, "--resume", "--seed", "3"], Toy(), 1)
    assert "has --seed 0: resume with the same" in ended.err


def test_another_model_is_refused_on_resume(tmp_path: Path) -> None:
    contents = stage_contents([1, 1])
    write_plan(tmp_path, contents)
    run = tmp_path / "run"
    assert run_plan(tmp_path, ["--run-dir", str(run), "--epochs", "1"], Toy(), 2).statuses == [0, 0]
    (path,) = run.glob("checkpoints/*/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["model"]["graph_hash"] = "sha256:another"
    rewrite(path, manifest)
    ended = run_plan(tmp_path, ["--run-dir", str(run), "--resume", "--epochs", "2"], Toy(), 2)
    assert ended.statuses == [2, 2]
    (line,) = errors(ended.err)
    assert "is of another model" in line


@pytest.mark.parametrize(
    ("replicas", "signalled"),
    [
        ([2, 1], [1]),
        pytest.param([1, 1], [0, 1], marks=pytest.mark.slow),
        pytest.param([1, 1], [0], marks=pytest.mark.slow),
        pytest.param([1], [0], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_signal_to_some_stops_all_at_a_checkpoint(tmp_path: Path, replicas: list[int], signalled: list[int]) -> None:
    """Worker 0 is idle. One line says where training stopped, and --resume goes on from there."""
    folder = write_plan(tmp_path, stage_contents(replicas, idle=1))
    run, world = tmp_path / "run", 1 + sum(replicas)
    arguments = ["--run-dir", str(run), "--checkpoint-minibatches", "3", "--log-every", "0", "--epochs"]
    context = multiprocessing.get_context("fork")
    watcher = context.Process(target=_interrupt, args=(str(run), signalled))
    watcher.start()
    ended = run_plan(folder, [*arguments, "1000000"], Toy(), world)
    watcher.join()
    assert ended.statuses == [0] * world, ended.err
    (line,) = [line for line in ended.err.splitlines() if "--resume" in line]
    last = latest_checkpoint(run)
    assert last is not None
    assert line == f"stopped after {last.position}: --resume goes on from there"
    assert "Traceback" not in ended.err
    assert not errors(ended.err)
    before = curve(run)
    assert len(before) == 20 * last.position.epoch + last.position.minibatch
    ended = run_plan(folder, [*arguments, str(last.position.epoch + 2), "--resume"], Toy(), world)
    assert ended.statuses == [0] * world, ended.err
    after = curve(run)
    assert len(after) == 20 * (last.position.epoch + 2)
    assert after | before == after


def _interrupt(run: str, signalled: list[int]) -> None:
    """When the first checkpoint is there, interrupt the workers, whose process ids are beside their logs."""
    while not list(Path(run).glob("checkpoints/*/manifest.json")):
        time.sleep(0.01)
    for rank in signalled:
        os.kill(int((Path(run).parent / f"worker-{rank}.pid").read_text()), signal.SIGINT)


def test_a_loss_that_is_lost_is_said_once_and_leaves_a_summary(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([1, 2]))
    run = tmp_path / "run"
    ended = run_plan(tmp_path, ["--run-dir", str(run), "--epochs", "2", "--on-nan", "warn"], Toy(loss="nan"), 3)
    assert ended.statuses == [0, 0, 0], ended.err
    assert ended.err.count("the loss became non-finite (nan) in epoch 1/2, minibatch 1/20") == 1
    assert ended.err.count("non-finite") == 1
    summary = json.loads((run / "summary.json").read_text())
    assert [epoch["loss"] for epoch in summary["epochs"]] == [None, None]


@pytest.mark.parametrize(
    ("toy", "says"),
    [
        (Toy(fault=("forward", 0, 3)), "the model's forward at stage 0 (rank 0), minibatch 3, failed: ValueError: bad"),
        (Toy(fault=("backward", 1, 2)), "the model's backward at stage 1 (rank 1), minibatch 2, failed: ValueError:"),
        (Toy(fault=("step", 0, 0)), "the optimizer's step at stage 0 (rank 0), minibatch 0, failed: ValueError: bad"),
        (Toy(fault=("metric", 1, 0)), "the job's metric at stage 1 (rank 1), minibatch 0, failed: ValueError: bad"),
        (Toy(fault=("vector", 1, 0)), "the job's metric must return one number"),
    ],
    ids=lambda value: value.fault[0] if isinstance(value, Toy) else "",
)
def test_faults_of_the_users_code_name_stage_and_minibatch(tmp_path: Path, toy: Toy, says: str) -> None:
    assert failed(tmp_path, [1, 1], toy, *ONE_EPOCH).startswith(says)


def test_what_nobody_foresaw_is_one_line_and_a_traceback_in_the_run_folder(tmp_path: Path) -> None:
    write_plan(tmp_path, stage_contents([1, 1]))
    run = tmp_path / "run"
    ended = run_plan(tmp_path, ["--run-dir", str(run)], Toy(fault=("load", 1, 0)), 2)
    assert ended.statuses == [2, 1]
    (line,) = ended.err.splitlines()
    assert line.startswith("error: something failed unexpectedly (rank 1, stage 1): ValueError: bad ")
    assert "Traceback" in (run / "errors" / "rank-1.txt").read_text()


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--seed", str(2**63)], f"more than {2**63 - 1}"), (["--threads", "4097"], "more than 4096")],
)
def test_options_are_bounded(option: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        worker_parser("prog").parse_args(["plan", *option])
    assert message in capsys.readouterr().err
    assert worker_parser("prog").parse_args(["plan", "--seed", str(2**63 - 1)]).seed == 2**63 - 1


def test_an_empty_test_set_is_none_in_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_plan(tmp_path, stage_contents([1, 1]))
    ended = run_plan(tmp_path, ["--run-dir", str(run), "--epochs", "1"], Toy(test_samples=0), 2)
    assert ended.statuses == [0, 0], ended.err
    assert json.loads((run / "summary.json").read_text())["epochs"][0]["test_accuracy"] is None
    folder = write_plan(tmp_path / "inference", stage_contents([1], mode="inference"))
    ended = run_plan(folder, [], Toy(test_samples=0), 1)
    assert errors(ended.err) == ["error: the job's test data is empty"]

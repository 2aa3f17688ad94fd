"""What goes wrong in workers comes out as one line with its status, nobody hangs, and nothing is restarted in vain."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from extents import slow_but_for
from launching import curve
from saved import latest
from toy_workers import Toy, run_plan, run_toy, stage_contents, write_plan
from worker_host import Ended

from pipeplan_launch import child_processes, supervisor
from pipeplan_launch.command_line import worker_parser
from pipeplan_launch.elastic import restart_state
from pipeplan_launch.elastic.servers import ServerPlace, StoreAccess
from pipeplan_launch.worker_monitor import NoFurtherAttempt, _HealthCheckHandler


def run(folder: Path, replicas: list[int], toy: Toy, *options: str, **plan: Any) -> Ended:
    return run_toy(folder, toy, replicas, "--log-every", "0", *options, **plan)


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_an_error_of_one_worker_is_said_once(tmp_path: Path) -> None:
    ended = run(tmp_path, [2, 1], Toy(fail_rank=2), idle=1)
    assert ended.statuses == [2, 2, 2, 2]
    assert ended.err.splitlines() == ["error: rank 2 cannot load"]
    assert not (tmp_path / "run" / "checkpoints").exists()


AT = r"at stage {0} \(rank {0}\), minibatch {1}, failed: ValueError: bad"
EACH = r"the job's loss \(lambda of .*must return a tensor with one number, the mean over the minibatch"
FAILURES: list[tuple[list[int], Toy, str]] = [
    ([1, 1, 1], Toy(die=(0, 3)), ".* minibatch .*(from|to) rank 0"),
    ([1, 1, 1], Toy(die=(2, 0)), ".* minibatch .*(from|to) rank 2"),
    ([2], Toy(die=(1, 3)), r"stage 0 \(rank 0\) could not average the gradients of group 3 with ranks \[1\]"),
    (
        [1, 1],
        Toy(loss="broken"),
        r"the job's loss \(broken_loss\) at stage 1 .*minibatch 0, .*RuntimeError: .*reshape\(3",
    ),
    ([1], Toy(loss="each-trained"), EACH),
    ([1], Toy(loss="each-judged"), EACH),
    ([1, 1], Toy(loss="detached"), ".*does not depend on any parameter that can be trained$"),
    ([1, 1], Toy(fault=("forward", 0, 3)), "the model's forward " + AT.format(0, 3)),
    ([1, 1], Toy(fault=("backward", 1, 2)), "the model's backward " + AT.format(1, 2)),
    ([1, 1], Toy(fault=("step", 0, 0)), "the optimizer's step " + AT.format(0, 0)),
    ([1, 1], Toy(fault=("metric", 1, 0)), "the job's metric " + AT.format(1, 0)),
    ([1, 1], Toy(fault=("vector", 1, 0)), "the job's metric must return one number"),
]


@pytest.mark.parametrize("case", FAILURES, ids=lambda case: f"{case[1].die or case[1].fault or case[1].loss}")
def test_a_failure_is_one_line_that_names_it(tmp_path: Path, case: tuple[list[int], Toy, str]) -> None:
    """Faults of the user's code name stage and minibatch."""
    replicas, toy, says = case
    ended = run(tmp_path, replicas, toy, "--epochs", "1", "--timeout", "20")
    dead = None if toy.die is None else toy.die[0]
    assert ended.statuses == [9 if rank == dead else 2 for rank in range(sum(replicas))]
    assert "Traceback" not in ended.err
    (line,) = errors(ended.err)
    assert re.match("error: " + says, line), line
    assert (tmp_path / "run" / "error.txt").read_text().strip() == line.removeprefix("error: ")


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
    at = latest(folder).position
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


KILLED = "was ended by SIGKILL (out of memory is the usual reason for SIGKILL)"


def failures(statuses: dict[int, int], order: tuple[int, ...] = ()) -> Any:
    """By rank, as torchrun has them; `order`: which failed first."""
    return {
        rank: SimpleNamespace(exitcode=code, timestamp=order.index(rank) if order else 0)
        for rank, code in statuses.items()
    }


def test_only_the_first_worker_at_fault_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for statuses, order, status, said in (
        ({0: 2, 1: 2}, (), 2, ""),
        ({0: 130, 2: 2}, (), 2, ""),
        ({0: 130, 2: -9}, (), 1, f"error: worker 2 {KILLED}\n"),
        ({0: 2, 2: -11}, (), 1, "error: worker 2 was ended by SIGSEGV\n"),
        ({0: -15, 1: -15, 2: 1}, (), 1, "error: worker 2 ended with status 1\n"),
        ({0: -15, 1: 2}, (), 2, ""),
        ({1: -15}, (), 1, "error: worker 1 was ended by SIGTERM\n"),
        ({0: -6, 1: -15, 2: -9}, (1, 2, 0), 1, f"error: worker 2 {KILLED}\n"),
    ):
        error: Any = SimpleNamespace(failures=failures(statuses, order))
        assert supervisor._report_failure(error) == status
        assert capsys.readouterr().err == said


def test_a_restart_before_the_first_minibatch_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for statuses, noticed, cause in (
        ({1: -9}, "", f"worker 1 {KILLED}"),
        ({0: 3, 1: 7}, "0 rank 0 lost another worker", "worker 1 ended with status 7"),
        ({0: 3, 1: 3}, "0 rank 0 could not connect", "rank 0 could not connect"),
        ({0: 3}, "", "a worker on another server was lost"),
    ):
        with restart_state.attempts_folder() as folder:
            if noticed:
                (folder / "fault").write_text(noticed)
            supervisor._report_restart(failures(statuses), 1, 3)
            assert capsys.readouterr().err == f"{cause}; restart 1 of 3: no minibatch had been run\n"
            restart_state.record_begun()
            supervisor._report_restart(failures(statuses), 1, 3)  # the next attempt says it, with its checkpoint
            assert capsys.readouterr().err == ""


def test_the_first_fault_of_an_attempt_is_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with restart_state.attempts_folder():
        for number in (0, 1):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
            assert restart_state.fault_of(number) is None
            restart_state.record_fault(f"first of {number}")
            restart_state.record_fault("later")
            assert restart_state.fault_of(number) == f"first of {number}"
        assert restart_state.only_start_ups()
        restart_state.record_begun()
        assert (restart_state.has_begun(0), restart_state.has_begun(1)) == (False, True)
        assert not restart_state.only_start_ups()


def test_what_torchrun_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own variables do not reach it, nor do options that would leave the store to it."""
    environment = {"PET_STANDALONE": "1", "PET_RDZV_BACKEND": "c10d", "PETS": "2"}
    supervisor._ignore_torchrun_variables(environment)
    assert environment == {"PETS": "2"}
    assert supervisor.main(["--nnodes", "2", "-m", "pipeplan_measure.selftest"]) == 2
    assert capsys.readouterr().err.startswith("error: several servers need --nnodes, --node-rank, --master-addr")
    assert ServerPlace.of({}) == ServerPlace.of({"--nnodes": "1"}) == ServerPlace(0, 1)
    access = StoreAccess(ServerPlace(0, 1), 1)
    ours = "--standalone -m pipeplan_launch plan --epochs 2"
    for given, restarts in ((ours, 3), (f"{ours} --restarts=0", 0), ("--standalone else.py --restarts 7", 0)):
        options = supervisor._worker_options(given.split())
        assert (options is None) == ("else.py" in given)
        assert f"--max-restarts={restarts}" in supervisor._torchrun_arguments(given.split(), options, tmp_path, access)


UNPICKLES_NOTHING = """
import sys
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from pipeplan_launch.supervisor import main

dynamic_rendezvous.pickle = None  # this module reads what torchrun's own rendezvous keeps in the store
sys.exit(main(sys.argv[1:]))
"""


def test_the_store_of_one_machine_is_read_without_unpickling() -> None:
    command = [sys.executable, "-c", UNPICKLES_NOTHING, "--standalone", "--nproc-per-node=1", "--no-python"]
    ended = subprocess.run([*command, "echo", "started"], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "started\n", "")


@pytest.mark.parametrize("why", ["an error", "a stop"])
def test_nothing_is_started_again_in_vain(why: str) -> None:
    with restart_state.attempts_folder():
        overseer = _HealthCheckHandler(None)

        def tell(left: int, state: str) -> None:
            """As torchrun's metrics do in every round."""
            overseer.emit(SimpleNamespace(name="workers.default.remaining_restarts", value=left))
            overseer.emit(SimpleNamespace(name=f"workers.default.{state}", value=1))

        tell(2, "failed")  # a fault
        if why == "an error":
            restart_state.record_final_status(2)
        else:
            restart_state.record_stop_signal(signal.SIGTERM)
        tell(2, "healthy")
        tell(0, "failed")  # torchrun then ends by itself, and names the worker
        with pytest.raises(NoFurtherAttempt):
            tell(1, "failed")


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
def test_children_that_are_stopped_for_long_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "EVERY_S", 0.0)
    stopped, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    watch, pids = child_processes.StoppedChildren(patience_s=0.2), {stopped.pid, other.pid}
    assert pids <= set(child_processes.child_pids())
    os.kill(stopped.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while stopped.poll() is None and time.monotonic() < deadline:
        watch.end_those_stopped_too_long()
        time.sleep(0.02)
    assert stopped.wait() == -signal.SIGKILL
    assert other.poll() is None
    child_processes.signal_all([other.pid, stopped.pid], signal.SIGTERM)  # the second is gone: that is no error
    assert other.wait() == -signal.SIGTERM
    assert not pids & set(child_processes.child_pids())

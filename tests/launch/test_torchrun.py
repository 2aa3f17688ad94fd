"""What launch.sh makes of workers that failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeplan_launch import child_processes
from pipeplan_launch.elastic import restart_state
from pipeplan_launch.elastic.servers import ServerPlace
from pipeplan_launch.supervisor import (
    _ignore_torchrun_variables,
    _report_failure,
    _report_restart,
    _torchrun_options,
    _worker_options,
    main,
)


@dataclass
class Failure:
    exitcode: int
    timestamp: int = 0


@dataclass
class Error:
    failures: dict[int, Failure]


@pytest.mark.parametrize(
    ("statuses", "status", "said"),
    [
        ({0: 2, 1: 2}, 2, ""),
        ({0: 130, 2: 2}, 2, ""),
        ({0: 130, 2: -9}, 1, "error: worker 2 was ended by SIGKILL (out of memory is the usual reason for SIGKILL)\n"),
        ({0: 2, 2: -11}, 1, "error: worker 2 was ended by SIGSEGV\n"),
        ({0: -15, 1: -15, 2: 1}, 1, "error: worker 2 ended with status 1\n"),
        ({0: -15, 1: 2}, 2, ""),
        ({1: -15}, 1, "error: worker 1 was ended by SIGTERM\n"),
        ({1: 1}, 1, "error: worker 1 ended with status 1\n"),
    ],
)
def test_only_the_workers_at_fault_are_named(
    statuses: dict[int, int], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = Error({rank: Failure(code) for rank, code in statuses.items()})
    assert _report_failure(error) == status  # type: ignore[arg-type]
    assert capsys.readouterr().err == said


def test_the_first_to_fail_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    error = Error({0: Failure(-6, timestamp=11), 1: Failure(-15, timestamp=9), 2: Failure(-9, timestamp=10)})
    assert _report_failure(error) == 1  # type: ignore[arg-type]
    assert "worker 2 was ended by SIGKILL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "noticed", "cause"),
    [
        ({1: -9}, "", "worker 1 was ended by SIGKILL (out of memory is the usual reason for SIGKILL)"),
        ({0: 3, 1: 7}, "0 rank 0 lost another worker", "worker 1 ended with status 7"),
        ({0: 3, 1: 3}, "0 rank 0 could not connect", "rank 0 could not connect"),
        ({0: 3}, "", "a worker on another server was lost"),
    ],
)
def test_a_restart_before_the_first_minibatch_is_said(
    statuses: dict[int, int], noticed: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failures: Any = {rank: Failure(code) for rank, code in statuses.items()}
    with restart_state.attempts_folder() as folder:
        if noticed:
            (folder / "fault").write_text(noticed)
        _report_restart(failures, 1, 3)
        assert capsys.readouterr().err == f"{cause}; restart 1 of 3: no minibatch had been run\n"
        restart_state.record_begun()
        _report_restart(failures, 1, 3)  # the next attempt says it, with its checkpoint
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


def test_variables_of_torchrun_do_not_reach_it() -> None:
    environment = {"PET_STANDALONE": "1", "PET_RDZV_BACKEND": "c10d", "PETS": "2"}
    _ignore_torchrun_variables(environment)
    assert environment == {"PETS": "2"}


def test_options_that_would_leave_the_store_to_torchrun_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nnodes", "2", "-m", "pipeplan_measure.selftest"]) == 2
    assert capsys.readouterr().err == (
        "error: several servers need --nnodes, --node-rank, --master-addr and --master-port, and one server needs none "
        "of them\n"
    )
    assert ServerPlace.of({}) == ServerPlace.of({"--nnodes": "1"}) == ServerPlace(0, 1)


def test_restarts_are_those_of_the_workers_options(tmp_path: Path) -> None:
    command = ["--standalone", "-m", "pipeplan_launch", "plan", "--epochs", "2"]
    given = _worker_options(command)
    assert given is not None
    assert "--max-restarts=3" in _torchrun_options(given, tmp_path)
    given = _worker_options([*command, "--restarts=0"])
    assert "--max-restarts=0" in _torchrun_options(given, tmp_path)
    assert _worker_options(["--standalone", "else.py", "--restarts", "7"]) is None
    assert "--max-restarts=0" in _torchrun_options(None, tmp_path)


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


@pytest.fixture
def overseer() -> Iterator[Any]:
    """What torchrun's metrics go to, in a launcher."""
    from pipeplan_launch.worker_monitor import _HealthCheckHandler

    with restart_state.attempts_folder():
        yield _HealthCheckHandler(None)


def tell(overseer: Any, left: int, state: str) -> None:
    """As torchrun does in every round."""
    overseer.emit(SimpleNamespace(name="workers.default.remaining_restarts", value=left))
    overseer.emit(SimpleNamespace(name=f"workers.default.{state}", value=1))


@pytest.mark.parametrize("why", ["an error", "a stop"])
def test_nothing_is_started_again_in_vain(overseer: Any, why: str) -> None:
    from pipeplan_launch.worker_monitor import NoFurtherAttempt

    tell(overseer, 2, "failed")  # a fault
    if why == "an error":
        restart_state.record_final_status(2)
    else:
        restart_state.record_stop_signal(signal.SIGTERM)
    tell(overseer, 2, "healthy")
    tell(overseer, 0, "failed")  # torchrun then ends by itself, and names the worker
    with pytest.raises(NoFurtherAttempt):
        tell(overseer, 1, "failed")


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
def test_children_that_are_stopped_for_long_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "EVERY_S", 0.0)
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    watch = child_processes.StoppedChildren(patience_s=0.2)
    assert {sleeper.pid for sleeper in sleepers} <= set(child_processes.child_pids())
    os.kill(sleepers[0].pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while sleepers[0].poll() is None and time.monotonic() < deadline:
        watch.end_those_stopped_too_long()
        time.sleep(0.02)
    assert sleepers[0].wait() == -signal.SIGKILL
    assert sleepers[1].poll() is None
    child_processes.signal_all(
        [sleepers[1].pid, sleepers[0].pid], signal.SIGTERM
    )  # the first is gone: that is no error
    assert sleepers[1].wait() == -signal.SIGTERM
    assert not {sleeper.pid for sleeper in sleepers} & set(child_processes.child_pids())

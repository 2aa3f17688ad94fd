"""What launch.sh makes of workers that failed, and what it hands to torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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
from pipeplan_launch.worker_monitor import NoFurtherAttempt, _HealthCheckHandler

KILLED = "was ended by SIGKILL (out of memory is the usual reason for SIGKILL)"


def failures(statuses: dict[int, int], order: tuple[int, ...] = ()) -> Any:
    """By rank, as torchrun has them; `order`: which failed first."""
    return {
        rank: SimpleNamespace(exitcode=code, timestamp=order.index(rank) if order else 0)
        for rank, code in statuses.items()
    }


@pytest.mark.parametrize(
    ("statuses", "order", "status", "said"),
    [
        ({0: 2, 1: 2}, (), 2, ""),
        ({0: 130, 2: 2}, (), 2, ""),
        ({0: 130, 2: -9}, (), 1, f"error: worker 2 {KILLED}\n"),
        ({0: 2, 2: -11}, (), 1, "error: worker 2 was ended by SIGSEGV\n"),
        ({0: -15, 1: -15, 2: 1}, (), 1, "error: worker 2 ended with status 1\n"),
        ({0: -15, 1: 2}, (), 2, ""),
        ({1: -15}, (), 1, "error: worker 1 was ended by SIGTERM\n"),
        ({0: -6, 1: -15, 2: -9}, (1, 2, 0), 1, f"error: worker 2 {KILLED}\n"),
    ],
)
def test_only_the_first_worker_at_fault_is_named(
    statuses: dict[int, int], order: tuple[int, ...], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error: Any = SimpleNamespace(failures=failures(statuses, order))
    assert _report_failure(error) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("statuses", "noticed", "cause"),
    [
        ({1: -9}, "", f"worker 1 {KILLED}"),
        ({0: 3, 1: 7}, "0 rank 0 lost another worker", "worker 1 ended with status 7"),
        ({0: 3, 1: 3}, "0 rank 0 could not connect", "rank 0 could not connect"),
        ({0: 3}, "", "a worker on another server was lost"),
    ],
)
def test_a_restart_before_the_first_minibatch_is_said(
    statuses: dict[int, int], noticed: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with restart_state.attempts_folder() as folder:
        if noticed:
            (folder / "fault").write_text(noticed)
        _report_restart(failures(statuses), 1, 3)
        assert capsys.readouterr().err == f"{cause}; restart 1 of 3: no minibatch had been run\n"
        restart_state.record_begun()
        _report_restart(failures(statuses), 1, 3)  # the next attempt says it, with its checkpoint
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
    _ignore_torchrun_variables(environment)
    assert environment == {"PETS": "2"}
    assert main(["--nnodes", "2", "-m", "pipeplan_measure.selftest"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: several servers need --nnodes, --node-rank, --master-addr and --m"
    )
    assert ServerPlace.of({}) == ServerPlace.of({"--nnodes": "1"}) == ServerPlace(0, 1)
    command = ["--standalone", "-m", "pipeplan_launch", "plan", "--epochs", "2"]
    for given, restarts in (
        (command, 3),
        ([*command, "--restarts=0"], 0),
        (["--standalone", "else.py", "--restarts", "7"], 0),
    ):
        options = _worker_options(given)
        assert (options is None) == ("else.py" in given)
        assert f"--max-restarts={restarts}" in _torchrun_options(options, tmp_path)


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

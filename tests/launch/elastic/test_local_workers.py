"""Processes of one machine: what they get from what starts them, and when signals end them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from pipeplan_launch.elastic import restart_state
from pipeplan_launch.elastic.local_workers import fork_worker, on_one_machine, stay_on_loopback, worker_variables
from pipeplan_launch.elastic.store import environment_store, open_store, serve_store

PATIENCE = timedelta(seconds=30)


@pytest.mark.skipif(not Path("/sys/class/net/lo").exists(), reason="the loopback interface has another name")
def test_what_was_exported_for_other_runs_does_not_count() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth", "NCCL_COMM_ID": "10.0.0.1:9", "HOME": "/"}
    stay_on_loopback(environment)
    assert environment.pop("TP_SOCKET_IFNAME") == "lo"
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "HOME": "/"}


def test_whether_all_workers_are_here() -> None:
    for expected, variables in (
        (True, "WORLD_SIZE=1 MASTER_ADDR=10.0.0.1"),
        (True, "WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 MASTER_ADDR=10.0.0.1"),
        (False, "WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1"),
        (False, "WORLD_SIZE=4 MASTER_ADDR=10.0.0.1"),
        (True, "WORLD_SIZE=4 MASTER_ADDR=127.0.0.1"),
        (True, "WORLD_SIZE=4 MASTER_ADDR=::1"),
        (False, "LOCAL_WORLD_SIZE=2"),
        (False, ""),
    ):
        assert on_one_machine(dict(one.split("=") for one in variables.split())) is expected, variables


def _raise(error: BaseException) -> object:
    raise error


def test_a_forked_worker_ends_with_the_status_of_its_work() -> None:
    before = dict(os.environ)
    for work, status in (
        (lambda: None, 0),
        (lambda: _raise(SystemExit(7)), 7),
        (lambda: _raise(SystemExit("a text")), 1),
        (lambda: _raise(KeyError("unforeseen")), 1),
        (lambda: _raise(SystemExit(int(os.environ["RANK"]))), 5),
    ):
        pid = fork_worker(work, {"RANK": 5})
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    assert dict(os.environ) == before


def _collect_beside_threads() -> None:
    for _ in range(16):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    gc.collect()


def test_a_forked_worker_collects_nothing_of_its_parent() -> None:
    """The end of a store would wait for a thread of its own, whose place in memory another thread may have taken."""
    garbage: list[object] = [serve_store(PATIENCE)]
    garbage.append(garbage)
    gc.disable()
    try:
        del garbage
        pid = fork_worker(_collect_beside_threads, {})
        until = time.monotonic() + 5
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    finally:
        gc.enable()
    assert ended == (pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at sockets as Linux shows them")
@pytest.mark.parametrize("served", [True, False], ids=["by the parent", "by worker 0"])
def test_the_store_of_one_machine_is_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch, served: bool) -> None:
    store = serve_store(PATIENCE)
    variables = worker_variables(0, 2, store.port)
    if not served:
        port, store = store.port, None
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    own = environment_store(PATIENCE)
    port = int(variables["MASTER_PORT"])
    open_store(port, PATIENCE).set("key", "value")
    assert own.get("key") == b"value"
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
    assert [place for place in listening if place.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    if served:
        assert store.get("key") == b"value"


CHILD = "from pipeplan_launch.elastic.signals import die_with_parent as d; print(d(), flush=True); input()"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_worker_dies_with_its_launcher() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "True\n"
        parent.kill()
        # The child holds the pipe's other end: its end is the pipe's.
        assert parent.stdout.read() == ""


BEGIN = """
import os, sys, time
from pipeplan_launch.elastic import signals
signals.catch_signals()
"""
BLOCK = """
import ctypes
mutex = ctypes.create_string_buffer(64)  # all zeros is a mutex that is free
library = ctypes.CDLL(None)
library.pthread_mutex_lock(mutex)
print("ready", flush=True)
library.pthread_mutex_lock(mutex)  # no signal handler of Python's runs until another thread unlocks it
print("done", flush=True)
"""
GRACEFUL = "signals.handle_requests_with(lambda: print('asked', flush=True))\n"
UNBLOCK = """
def unblock():
    print("asked", flush=True)
    library.pthread_mutex_unlock(mutex)
signals.handle_requests_with(unblock)
"""
CHECKED = """
print("ready", flush=True)
while True:
    try:
        signals.check_interrupt()
    except signals.Interrupted as signal:
        print(signal, flush=True)
        break
    time.sleep(0.01)
"""


class Worker:
    """A process that runs some code, and is sent signals once it is ready."""

    def __init__(self, code: str, launcher: Path | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if name != restart_state.VARIABLE}
        if launcher is not None:
            environment[restart_state.VARIABLE] = str(launcher)
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + code], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """(status, the rest of what it said)."""
        said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, " ".join(said.split())


LAST_WORDS = "signals.call_before_exit(lambda over: {})\n"


@pytest.mark.parametrize(
    ("code", "number", "status", "said"),
    [
        (CHECKED, signal.SIGINT, 0, "SIGINT"),
        (
            GRACEFUL + LAST_WORDS.format("print('left', over, flush=True)") + BLOCK,
            signal.SIGTERM,
            restart_state.STATUS_PEER_LOST,
            "left False",
        ),
        (GRACEFUL + LAST_WORDS.format("time.sleep(1000)") + BLOCK, signal.SIGTERM, restart_state.STATUS_PEER_LOST, ""),
    ],
    ids=["at the next check", "after a fault", "last words"],
)
def test_what_ends_a_worker(tmp_path: Path, code: str, number: int, status: int, said: str) -> None:
    """A SIGTERM that the launcher knows nothing of follows a fault, and last words do not keep the worker."""
    worker = Worker(code, None if code == CHECKED else tmp_path)
    worker.send(number)
    assert worker.end() == (status, said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", ["", UNBLOCK], ids=["before training", "in training"])
def test_a_signal_that_the_launcher_knows_is_a_request(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is handed on though the main thread waits."""
    monkeypatch.setenv(restart_state.VARIABLE, str(tmp_path))
    worker = Worker(code + BLOCK, tmp_path)
    worker.send(signal.SIGTERM)
    restart_state.record_stop_signal(signal.SIGTERM)  # it may come a moment later
    assert worker.end() == ((0, "asked done") if code else (130, ""))
    assert restart_state.final_status() == (None if code else 130)


def test_only_a_second_request_ends_what_goes_on_gracefully() -> None:
    """However long the first one takes to be handed on."""
    waits = "signals.handle_requests_with(lambda: (print('asked', flush=True), time.sleep(1000)))\n"
    worker = Worker(waits + "signals.REPEAT_S, signals.NOTED_S = 0.3, 0.1\n" + CHECKED)
    worker.send(signal.SIGTERM)
    worker.send(signal.SIGINT)  # the same request, by another way
    assert worker.line() == "asked"
    time.sleep(0.4)
    assert worker.process.poll() is None
    worker.send(signal.SIGINT)
    status, said = worker.end()
    assert status == 0
    # Of two that wait to be delivered, any may be the first. The second request calls the handler again, in a thread
    # that the process does not wait for when it ends, so its "asked" may be there, overtake, or be missing.
    assert said.replace("asked", "").strip() in ("SIGTERM", "SIGINT")


def test_an_event_loop_does_not_take_the_signals_away() -> None:
    worker = Worker(GRACEFUL + "import asyncio\nasyncio.run(asyncio.sleep(0))\n" + CHECKED)
    worker.send(signal.SIGTERM)
    assert worker.line() == "asked"
    worker.process.kill()
    worker.end()


def test_a_data_loaders_process_dies_of_signals() -> None:
    worker = Worker("child = os.fork()\nif child:\n    print(os.wait()[1])\n    sys.exit()\n" + CHECKED)
    (child,) = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGTERM)
    assert worker.end() == (0, str(int(signal.SIGTERM)))

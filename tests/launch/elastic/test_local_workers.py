"""What workers of one machine get from the process that starts them."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

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

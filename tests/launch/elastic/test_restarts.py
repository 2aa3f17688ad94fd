"""After a fault all workers start again, and the loss goes on as if nothing had happened; after an error none does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from extents import slow_but_for
from launching import curve
from toy_workers import Toy, run_attempts, run_toy, stage_contents, write_plan

from pipeplan_launch.elastic import rendezvous, restart_state
from pipeplan_launch.elastic.rendezvous import Attempt, LaunchOver
from pipeplan_launch.errors import PeerLost
from pipeplan_launch.rank_mapping.host_identity import Location, location_json
from pipeplan_launch.supervisor import main

HERE = location_json(Location("a machine", "a name", "a network"))
OPTIONS = ("--epochs", "2", "--checkpoint-minibatches", "6", "--log-every", "0")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], float]:
    """The toy's losses under 2-1, in 64-bit numbers."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    ended = run_toy(folder, Toy(), [2, 1], *OPTIONS)
    assert ended.statuses == [0, 0, 0], ended.err
    return curve(folder / "run")


def attempts(folder: Path, replicas: list[int], toys: list[Toy], *options: str, sizes: Any = None, **more: Any) -> Any:
    """How the attempts of one launch end."""
    write_plan(folder, [content | (sizes or {}) for content in stage_contents(replicas)])
    given = ["--run-dir", str(folder / "run"), *OPTIONS, *options]
    return run_attempts(folder, given, toys, sum(replicas), **more)


def said(ended: Any) -> list[str]:
    return [line for line in ended.err.splitlines() if not line.startswith(("epoch", "plan", "Asynchronous"))]


def test_the_loss_goes_on_as_if_no_worker_had_been_lost(tmp_path: Path, uninterrupted: Any) -> None:
    # In a first epoch before any checkpoint, in the middle of one, and in an evaluation (20 calls an epoch, then 12).
    ended = attempts(tmp_path, [2, 1], [Toy(die=(1, 2)), Toy(die=(2, 9)), Toy(die=(0, 14)), Toy()])
    assert [one.statuses for one in ended] == [[3, 9, 3], [3, 3, 9], [9, 3, 3], [0, 0, 0]], ended[3].err
    assert curve(tmp_path / "run") == uninterrupted
    first, second, third, fourth = map(said, ended)
    assert first == []
    assert second == ["worker 1 was lost; restart 1 of 3: training begins anew, as there is no checkpoint yet"]
    for number, worker, (line,) in ((2, 2, third), (3, 0, fourth)):
        assert line.startswith(f"worker {worker} was lost; restart {number} of 3: resumed from {tmp_path}/run/checkpoi")


def test_a_restart_may_number_the_processes_in_another_way(tmp_path: Path, uninterrupted: Any) -> None:
    """A server of two and one of one: which processes are on the first changes from attempt to attempt."""
    # By process: worker 0 is process 1, then 0, then 0 again, but on another server than worker 1 was at first.
    servers = [["small", "large", "large"], ["large", "large", "small"], ["large", "small", "large"]]
    sizes = {"servers": 2, "workers_per_server": 2, "server_sizes": [2, 1]}
    toys = [Toy(die=(1, 9)), Toy(die=(2, 9)), Toy()]
    ended = attempts(tmp_path, [2, 1], toys, sizes=sizes, servers=servers)
    assert [one.statuses for one in ended] == [[3, 9, 3], [3, 3, 9], [0, 0, 0]], [one.err for one in ended]
    assert curve(tmp_path / "run") == uninterrupted
    assert ended[1].err.startswith("worker 0 was lost; restart 1 of 2: resumed from ")
    assert "\nworker 2 was lost; restart 2 of 2: resumed from " in "\n" + ended[2].err


@pytest.mark.skipif(sys.platform != "linux", reason="finds connections as Linux shows them")
@pytest.mark.parametrize("rank", slow_but_for([0], [0, 2]))
def test_a_worker_that_was_cut_off_comes_back(tmp_path: Path, uninterrupted: Any, rank: int) -> None:
    """Also from the store that all share: it cannot tell anybody that it lives."""
    first, second = attempts(tmp_path, [2, 1], [Toy(), Toy()], cut_off=(rank, 9))
    assert (first.statuses, second.statuses) == ([3, 3, 3], [0, 0, 0]), first.err + second.err
    assert curve(tmp_path / "run") == uninterrupted
    (line,) = said(second)
    assert line.startswith(f"worker {rank} was lost; restart 1 of 1: resumed from ")


def test_what_no_restart_can_cure_is_not_tried_again(tmp_path: Path) -> None:
    """And the last fault is an error."""
    toy = Toy(fault=("forward", 1, 3))
    first, second = attempts(tmp_path, [1, 1], [toy, toy])
    assert first.statuses == second.statuses == [2, 2]
    assert first.err.count("error: ") == 1
    assert second.err == ""
    (ended,) = attempts(tmp_path / "last", [1, 1], [Toy(die=(1, 2))])
    assert ended.statuses == [2, 9]
    assert re.search(r"^error: stage 0 \(rank 0\).*rank 1", ended.err, re.MULTILINE)


def test_a_worker_that_hangs_at_an_epochs_end_is_noticed(tmp_path: Path) -> None:
    """In the last backward pass of the epoch, when the other stage has nothing to wait for but the epoch's end."""
    ended = attempts(tmp_path, [1, 1], [Toy(fault=("hang", 0, 19)), Toy()], "--timeout", "2")
    assert [one.statuses for one in ended] == [[3, 3], [0, 0]], ended[0].err + ended[1].err
    assert re.search(r"worker 0 hung for \d+ s in one action; restart 1 of 1: resumed from", ended[1].err)


def stores(count: int) -> list[Any]:
    """Clients of one store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return [server, *(dist.TCPStore("127.0.0.1", server.port) for _ in range(count - 1))]  # type: ignore[attr-defined]


def come(store: Any, rank: int, world: int, timeout_s: float = 10.0) -> int:
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        return rendezvous._assemble_attempt(store, world, deadline, own_location_json=HERE)
    return rendezvous._join_attempt(store, rank, deadline, own_location_json=HERE)


def test_workers_meet_in_any_order_and_join_no_attempt_that_went_without_them() -> None:
    """Or one whose rank 0 is gone, as happens where servers start again at their own step time."""
    clients, world = stores(3), 3
    with ThreadPoolExecutor() as pool:

        def arrive(*ranks: int, timeout_s: float = 10.0) -> list[Future[int]]:
            return [pool.submit(come, clients[rank], rank, world, timeout_s) for rank in ranks]

        assert clients[0].add("attempt", 1) == 1  # rank 0 came, called, and was lost
        waiting = arrive(1)
        time.sleep(0.1)
        assert clients[0].check(["1/here/1"])
        assert not waiting[0].done()
        for number, ranks in ((2, (0, 2)), (3, (2, 0, 1)), (4, (1, 2, 0))):
            assert [one.result() for one in (*waiting, *arrive(*ranks))] == [number] * world
            waiting = []
        (late,) = arrive(1, timeout_s=0.2)  # that attempt has gone: wait for another
        with pytest.raises(PeerLost):
            late.result()
    launch = stores(1)[0]
    launch.set("1/here/2", HERE)
    with pytest.raises(PeerLost, match="workers 1 and 3 did not come"):
        come(launch, 0, 4, timeout_s=0.05)
    clients[0].set(rendezvous.OVER_KEY, "")
    with pytest.raises(LaunchOver):
        come(clients[1], 1, 4)


def test_the_next_attempt_knows_who_was_lost() -> None:
    (store,) = stores(1)

    def attempt(number: int, rank: int) -> Attempt:
        return Attempt(number, rendezvous._under(str(number), store), store, rank, 3)

    assert attempt(1, 0).last_fault() is None
    assert attempt(2, 0).last_fault() == "not all workers started"
    store.set("1/go", "")
    attempt(1, 0).leave(fault="no answer")
    attempt(1, 2).leave(fault="another")
    assert attempt(2, 0).last_fault() == "worker 1 was lost"
    attempt(1, 1).leave(fault="none either")
    assert attempt(2, 0).last_fault() == "no answer"
    assert not attempt(2, 0).is_over()
    attempt(2, 1).leave(over=True)
    assert attempt(2, 0).is_over()


def test_what_the_launcher_remembers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with restart_state.attempts_folder() as folder:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
        assert restart_state.may_restart()
        for status in (2, 1):
            restart_state.record_final_status(status)
        assert (restart_state.final_status(), restart_state.may_restart()) == (1, False)
    assert not folder.exists()
    assert (restart_state.final_status(), restart_state.may_restart()) == (None, False)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere at all")
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("error: no temporary folder can be made: ")


def test_a_worker_that_is_not_to_begin_ends_without_torch(tmp_path: Path) -> None:
    (tmp_path / "final-2").touch()
    code = "import sys\nfrom pipeplan_launch.__main__ import main\nprint(main(['plan']), 'torch' in sys.modules)"
    environment = os.environ | {restart_state.VARIABLE: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("2 False\n", "")

"""Several processes that measure at the same time: how they meet, and what is made of their profiles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest

from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import GroupMember, combine_profiles, profile_model


def profile(scale: float, peak: int = 0) -> Profile:
    layers = (Layer("a", 1.0 * scale, 2.0 * scale, 10, 20, update_s=scale), Layer("b", 3.0, 4.0, 0, 7))
    sizes = (Size(8, (replace(layers[0], forward_s=9.0 * scale), layers[1]), (), 5.0 * scale, 6.0),)
    return Profile(
        layers, (), 4, graph_hash="h", whole_forward_s=scale, whole_backward_s=7.0, peak_bytes=peak, sizes=sizes
    )


def test_combined_takes_medians_of_times_and_the_most_memory() -> None:
    made = combine_profiles([profile(1.0, 5), profile(4.0, 9), profile(2.0, 3)])
    assert (made.layers[0].forward_s, made.layers[0].backward_s, made.layers[0].update_s) == (2.0, 4.0, 2.0)
    assert made.layers[1] == profile(1.0).layers[1]
    assert (made.whole_forward_s, made.whole_backward_s, made.peak_bytes) == (2.0, 7.0, 9)
    assert (made.sizes[0].layers[0].forward_s, made.sizes[0].whole_forward_s) == (18.0, 10.0)


def test_combined_refuses_other_graphs() -> None:
    with pytest.raises(InputError, match="did not trace the same graph"):
        combine_profiles([profile(1.0), replace(profile(1.0), graph_hash="other")])


def test_a_member_waits_for_the_others_and_keeps_its_load_up() -> None:
    ours, theirs = Pipe()
    steps: list[str] = []

    def work() -> None:
        member = GroupMember(theirs, 2)
        member.start()
        steps.append("started")
        member.finish(lambda: steps.append("load"))
        steps.append("finished")

    thread = threading.Thread(target=work)
    thread.start()
    assert ours.recv() == GroupMember.READY
    assert steps == []
    ours.send(GroupMember.GO)
    assert ours.recv() == GroupMember.READY
    while "load" not in steps:
        time.sleep(0)
    assert "finished" not in steps
    ours.send(GroupMember.GO)
    thread.join(10)
    assert (steps[0], steps[-1]) == ("started", "finished")


JOB = """
import os, torch
from pipeplan_launch import Job
def make():
    return Job(torch.nn.Linear(4, 4), inputs=lambda n: torch.ones(n, 4))
def dies():
    os._exit(7)
def empty():
    return None
"""

ENDLESS = [sys.executable, *["-m", "pipeplan", "profile", "jobs.py:make", "--processes", "2", "--repeats", "100000000"]]
"""Measures until somebody ends it."""


@pytest.mark.slow
def test_processes_measure_together(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOB)
    made = profile_model(f"{tmp_path}/jobs.py:make", ProfilerOptions(batches=(2, 4), repeats=3, processes=2))
    assert made.provenance.processes == 2
    assert "in each of 2 processes" in made.provenance.how
    assert [size.minibatch for size in made.sizes] == [4]
    assert all(layer.forward_s > 0 for layer in made.layers)
    assert children() == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "says"), [("dies", "ended with status 7"), ("empty", "returned NoneType")])
def test_what_goes_wrong_in_a_process_is_one_line(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "jobs.py").write_text(JOB)
    with pytest.raises(InputError, match=says):
        profile_model(f"{tmp_path}/jobs.py:{name}", ProfilerOptions(processes=2))
    assert children() == []


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOB)
    run = subprocess.Popen(ENDLESS, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(children(run.pid)) == 2)
        started = children(run.pid)
        time.sleep(1.0)
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130
        assert run.stderr is not None
        assert run.stderr.read().splitlines()[-1] == "error: interrupted"
        assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
        assert not (tmp_path / "profile.json").exists()
    finally:
        run.kill()
        run.wait()


@pytest.mark.slow
def test_no_process_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOB)
    run = subprocess.Popen(ENDLESS, cwd=tmp_path, stderr=subprocess.DEVNULL)
    until(lambda: len(children(run.pid)) == 2)
    started = children(run.pid)
    time.sleep(1.0)
    run.kill()
    run.wait()
    until(lambda: not [pid for pid in started if alive(pid)])


def until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended may wait for its parent to notice."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(of: int | None = None) -> list[int]:
    """Processes that this one, or another, started and has not seen end."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        found += [int(folder.name)] if parent == (of or os.getpid()) else []
    return found

"""What a machine lacks, and that a replay took too long, is said in one line."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulation
import network_namespaces as requirements
import pytest
import replay_run as run
from replay_builders import PROFILE, two_servers, write
from replay_run import last_line, working_folder

from pipeplan.errors import InputError

COMMANDS = ("unshare", "ip", "tc", "sysctl")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but commands that do nothing, on Linux, with torch."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in COMMANDS:
        script(folder, name, "exit 0")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return folder


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def complaint(processes: bool = False) -> str:
    with pytest.raises(InputError) as raised:
        requirements.check_requirements(processes)
    text = str(raised.value)
    assert text.startswith("plans cannot be replayed here: ")
    assert "\n" not in text
    return text


def test_nothing_is_missing(commands: Path) -> None:
    requirements.check_requirements()
    requirements.check_requirements(processes=True)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system(commands: Path, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert f"replays need network namespaces of Linux; this is {platform}" in complaint()


@pytest.mark.parametrize(("name", "package"), [("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")])
def test_a_command_that_is_missing(commands: Path, name: str, package: str) -> None:
    (commands / name).unlink()
    assert f"the command {name} is missing; install the package {package}" in complaint()


def test_without_torch(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs torch, which is not installed; pip install 'pipeplan[torch]'" in complaint()


def test_where_namespaces_are_not_allowed(commands: Path) -> None:
    script(commands, "unshare", "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1")
    assert "allows no namespaces without root (unshare: unshare failed: Operation not permitted)" in complaint()


@pytest.mark.parametrize(
    ("fails", "what"),
    [("*bridge*", "virtual switches"), ("*tbf*", "shaped links"), ("*veth*", "virtual cables"), ("*reno*", "TCP reno")],
)
def test_what_the_kernel_does_not_have(commands: Path, fails: str, what: str) -> None:
    script(commands, "unshare", f'case "$*" in {fails}) echo "Error: Unknown device type." >&2; exit 2;; esac')
    text = complaint()
    assert f"does not allow {what}" in text
    assert "Unknown device type" in text


def test_launchers_need_to_see_their_processes(commands: Path) -> None:
    script(commands, "unshare", 'case "$*" in *"mount -t proc"*) echo "mount: permission denied" >&2; exit 32;; esac')
    requirements.check_requirements()
    assert "a /proc of its own: mount: permission denied" in complaint(processes=True)


def test_what_is_kept_needs_an_empty_folder(tmp_path: Path) -> None:
    with working_folder(tmp_path / "a" / "b") as scratch:
        (scratch / "file").touch()
    assert (tmp_path / "a" / "b" / "file").exists()
    with pytest.raises(InputError, match="has something in it"), working_folder(tmp_path / "a"):
        pass
    with (
        pytest.raises(InputError, match="choose another folder for --keep"),
        working_folder(tmp_path / "a" / "b" / "file"),
    ):
        pass


def test_what_is_not_kept_goes_whatever_happens() -> None:
    scratches = []

    def work() -> None:
        with working_folder(None) as scratch:
            (scratch / "run").mkdir()
            scratches.append(scratch)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not scratches[0].exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [("a\nerror: b\nc\n", "b"), ("a\n\nc\n\n", "c"), ("", "no message")],
    ids=["error", "last", "nothing"],
)
def test_the_line_that_says_why(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_line(tmp_path / "log") == line


ENDLESS, FAILING, WELL = "import time; time.sleep(100)", "raise SystemExit(3)", ""


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Process ids, to be ended whatever happens."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="replays need Linux")
@pytest.mark.parametrize(
    ("programs", "limit_s", "statuses", "late"),
    [
        ([WELL, WELL], 60.0, [0, 0], False),
        ([ENDLESS, ENDLESS], 0.0, [-9, -9], True),
        ([FAILING, WELL], 60.0, [3, 0], False),
    ],
    ids=["well", "late", "failed"],
)
def test_who_is_ended_because_time_is_up(
    started: list[int], programs: list[str], limit_s: float, statuses: list[int], late: bool
) -> None:
    started += [
        os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", program], os.environ) for program in programs
    ]
    workers = {pid: rank for rank, pid in enumerate(started)}
    found, is_late = emulation._finish(workers, time.monotonic() + limit_s)
    started.clear()
    assert [found[rank] for rank in range(len(programs))] == statuses
    assert is_late is late


def test_what_is_said_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def too_slow(order: dict[str, Any], *rest: object) -> dict[str, Any]:
        limits.append(order["limit_s"])
        return {"statuses": [-9, -9], "late": True}

    monkeypatch.setattr(run, "check_requirements", lambda: None)
    monkeypatch.setattr(run, "run_order", too_slow)
    with pytest.raises(InputError) as raised:
        run.replay_plan(write(tmp_path / "plan", two_servers(), stages=2), PROFILE, run.ReplaySettings(seconds=7.0))
    text = str(raised.value)
    assert text.startswith(f"the replay took longer than {limits[0]:.0f} s, for 7 s of training: ")
    assert "less to do" in text
    assert "--seconds" in text
    assert "\n" not in text

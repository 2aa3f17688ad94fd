"""What a machine lacks is said in one line, before anything is made."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from pipeplan.errors import InputError
from pipeplan.replay import requirements
from pipeplan.replay.process import last_line, working_folder

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

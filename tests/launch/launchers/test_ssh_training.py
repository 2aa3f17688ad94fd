"""Training on several hosts over ssh, where a bash on this machine stands in for ssh; its options and hosts file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.launchers import ssh, ssh_requests
from pipeplan_launch.launchers.hosts_file import Host, read_hosts
from pipeplan_launch.launchers.ssh import Training
from pipeplan_launch.launchers.ssh_connection import (
    CHECK,
    USAGE,
    Launch,
    SshOptions,
    host_program,
    ssh_command,
    start_ssh,
)
from pipeplan_launch.launchers.ssh_requests import Abandoned, HostRequests, last_line


def parse(*arguments: str, **environment: str) -> SshOptions:
    return SshOptions.parse(arguments, environment, "/work")


def test_options_that_are_not_known_go_to_launch_sh_in_their_order() -> None:
    options = parse("--epochs", "10", "--hosts=my hosts", "--label", "--seed=3", "--ssh", "ssh  -F config", "--copies")
    assert options.launch_arguments == ["--epochs", "10", "--seed=3", "--copies"]
    assert (options.hosts_file, options.label, options.copy) == ("my hosts", True, False)
    assert options.ssh == ["ssh", "-F", "config"]
    assert (options.workdir, options.grace, options.address, options.port) == ("/work", "300", "", "")


def test_options_come_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert (parse(**environment).address, parse(**environment).port) == ("a", "1")
    options = parse("--address", "b", "--port=2", "--workdir=/tmp", "--grace", "7", **environment)
    assert (options.address, options.port, options.workdir, options.grace) == ("b", "2", "/tmp", "7")
    assert parse("--env", "A=b=c", "--env=B", B="d e").variables == ["A=b=c", "B=d e"]
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse("--with", "data/").copy_too == [str(tmp_path / "data")]


def test_wrong_options_are_refused() -> None:
    for arguments, message in (
        (["--env", "1=2"], "--env takes NAME or NAME=VALUE, not '1=2'"),
        (["--env", "NONE"], "--env NONE: this variable is not set here"),
        (["--with", "/no/where"], "--with /no/where: there is no such file or folder"),
        (["--with", "/"], "--with names a file to copy besides the plan: add --copy"),
        (["--epochs", "3", "--hosts"], "--hosts needs a value"),
        (["--grace", "0"], "--grace takes a number of seconds, not '0'"),
        (["--port", "ssh"], "the port must be a number, not 'ssh'"),
    ):
        with pytest.raises(LaunchError) as error:
            parse(*arguments).check()
        assert str(error.value) == message


def test_help_lists_all_options() -> None:
    assert parse("--hosts", "h", "--help", "--with", "/no/where").help
    for name in ("hosts", "env", "workdir", "copy", "with", "address", "port", "ssh", "label", "grace"):
        assert f"\n  --{name} " in USAGE


def test_hosts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"# two\r\na\r\n\n  me@b port=2  python=~/p # the other\nc address=1 folder=~/f X_1=a=b Y= port=")
    assert read_hosts(str(path)) == [
        Host("a"),
        Host("me@b", port="2", python="~/p"),
        Host("c", folder="~/f", address="1", variables=("X_1=a=b", "Y=")),
    ]


def test_wrong_lines_and_files_of_hosts_are_refused(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    for line, message in (
        ("-v", "'-v' is not the name of a host"),
        ("a port", "'port' is none of port=, folder=, python=, address= and NAME=VALUE"),
        ("a x=1", "'x=1' is none of port=, folder=, python=, address= and NAME=VALUE"),
    ):
        hosts.write_text(f"a\n{line}\n")
        with pytest.raises(LaunchError) as error:
            read_hosts(str(hosts))
        assert str(error.value) == f"{hosts}, line 2: {message}"
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "endless").open("wb") as file:
        file.truncate(1 << 36)
    for name, message in (
        ("none", "No such file or directory"),
        ("folder", "Is a directory"),
        ("pipe", "it is a device or a pipe, not a regular file"),
        ("/dev/zero", "it is a device or a pipe, not a regular file"),
        ("endless", "it has more than 1 MiB"),
    ):
        with pytest.raises(LaunchError) as error:
            read_hosts(str(tmp_path / name))
        assert str(error.value) == f"cannot read {tmp_path / name}: {message}"


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Two hosts. Their launch.sh runs the file `program-RANK`."""
    (tmp_path / "ssh").write_text('#!/bin/bash\nexec bash -c "${!#}"\n')
    (tmp_path / "launch.sh").write_text('#!/bin/bash\n. "${0%/*}/program-$NODE_RANK"\n')
    for name in ("ssh", "launch.sh"):
        (tmp_path / name).chmod(0o755)
    return Launch(
        hosts=[Host("a"), Host("b", port="22", variables=("WORD=x y",))],
        plan_folder=str(tmp_path),
        digest="sha256:0",
        python=sys.executable,
        ssh=[str(tmp_path / "ssh")],
        workdir=str(tmp_path),
        grace="5",
        copy=False,
        port="",
        variables=["ALL='\"$x"],
        arguments=["--run-dir", "a $b 'c'\n"],
    )


def run(launch: Launch, first: str, second: str) -> int:
    for number, program in enumerate((first, second)):
        Path(launch.plan_folder, f"program-{number}").write_text(program)
    return Training(launch, label=False).run()


def test_the_first_failure_stops_the_others_and_is_the_status(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "ALIVE_S", 0.05)
    monkeypatch.setattr(ssh, "STOP_OTHERS_S", 0.5)
    until_stopped = "trap 'exit 5' TERM; while :; do sleep 0.05; done"
    assert run(launch, until_stopped, "exit 4") == 4
    monkeypatch.setattr(ssh, "KILL_OTHERS_S", 1.0)
    assert run(launch, until_stopped.replace("exit 5", ":"), "exit 4") == 4


def test_values_reach_the_host_as_they_are(launch: Launch) -> None:
    out = Path(launch.plan_folder, "out")
    record = f'printf \'%s|\' "$WORD" "$ALL" "$@" "$NNODES" "$MASTER_PORT" >\'{out}\''
    assert run(launch.with_rendezvous("a", "123"), "exit 0", record) == 0
    assert out.read_text() == "x y|'\"$x|--run-dir|a $b 'c'\n|2|123|"


def test_what_ssh_is_given(launch: Launch) -> None:
    """The port, a name that is no option, and folders and interpreters in the home folder of the host."""
    assert ssh_command(launch, 1)[-5:-1] == ["-p", "22", "--", "b"]
    host = Host("b", folder="~/plans/a b", python="~/b c/python")
    launch = replace(launch, hosts=[launch.hosts[0], host])
    process = start_ssh(launch, 1, subprocess.PIPE, None)
    show = 'printf "%s|" "${folder#"$HOME"}" "${python#"$HOME"}"'
    assert process.communicate(host_program(launch, 1, show))[0] == b"/plans/a b|/b c/python|"
    with pytest.raises(LaunchError, match="cannot run /no/ssh: No such file or directory"):
        run(replace(launch, ssh=["/no/ssh"]), "", "")


def test_the_first_host_is_reached_where_ssh_reached_it(launch: Launch) -> None:
    for addresses, expected in (
        (["10.0.0.1", "-"], "10.0.0.1"),
        (["-", "-"], "a"),
        (["127.0.0.1", "::1"], "127.0.0.1"),
    ):
        assert ssh_requests._address_of_first(launch, addresses) == expected
    with pytest.raises(LaunchError, match=r"ssh reaches a at 127\.0\.0\.1, where b cannot reach it: give its --addre"):
        ssh_requests._address_of_first(launch, ["127.0.0.1", "10.0.0.2"])


def test_the_last_line_says_why() -> None:
    assert last_line("Warning: x\nssh: no\n  \n") == "ssh: no"
    assert last_line("") == ""


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_program_of_the_check_passes_shellcheck() -> None:
    done = subprocess.run(["shellcheck", "-"], input=CHECK, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_signal_before_the_last_request_has_begun_ends_the_others(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = HostRequests(launch)

    class InterruptedPool(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            if args == (1,):
                while not requests._running:
                    time.sleep(0.001)
                raise Abandoned
            return super().submit(fn, *args, **kwargs)

    monkeypatch.setattr(ssh_requests, "ThreadPoolExecutor", InterruptedPool)
    with pytest.raises(Abandoned):
        requests.on_all(lambda number: requests.run(number, lambda stdin: stdin.write(b"exec sleep 20\n") and None))
    with pytest.raises(Abandoned):
        requests.run(0, lambda stdin: None)

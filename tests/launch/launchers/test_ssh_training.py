"""Training on several hosts over ssh, where a bash on this machine stands in for ssh; its options and hosts file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from small_plans import servers_of, write_with_launcher

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.launchers import ssh
from pipeplan_launch.launchers.hosts_file import Host, read_hosts
from pipeplan_launch.launchers.ssh import Launch, Training, ssh_parser


def test_options_that_are_not_known_go_to_launch_sh_in_their_order() -> None:
    words = ["--epochs", "10", "--hosts=my hosts", "--seed=3", "--ssh", "ssh  -F config", "--copies", "--resume"]
    options, others = ssh_parser().parse_known_args(words)
    assert others == ["--epochs", "10", "--seed=3", "--copies", "--resume"]
    assert (options.hosts, options.copy, options.ssh) == ("my hosts", False, ["ssh", "-F", "config"])
    assert (options.workdir, options.grace, options.address) == (os.getcwd(), 300, None)
    assert ssh.FIRST_PORT <= options.port < ssh.FIRST_PORT + ssh.PORTS


def test_options_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MASTER_ADDR", "a"), ("MASTER_PORT", "1"), ("B", "d e")):
        monkeypatch.setenv(name, value)
    options = ssh_parser().parse_args(["--hosts", "h", "--env", "A=b=c", "--env=B"])
    assert (options.address, options.port, options.env) == ("a", 1, ["A=b=c", "B=d e"])
    options = ssh_parser().parse_args(["--hosts=h", "--address", "b", "--port=2", "--workdir=/tmp", "--grace", "7"])
    assert (options.address, options.port, options.workdir, options.grace) == ("b", 2, "/tmp", 7)


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--env", "1=2"], "--env: it takes NAME or NAME=VALUE, not '1=2'"),
        (["--env", "NONE"], "--env: the variable NONE is not set here"),
        (["--with", "/"], "--with names a file to copy besides the plan: add --copy"),
        (["--grace", "0"], "--grace: '0' is not a whole number of at least 1"),
        (["--port", "ssh"], "--port: 'ssh' is not a whole number of at least 1"),
        (["--hosts"], "--hosts: expected one argument"),
    ):
        with pytest.raises(SystemExit):
            ssh.main(["plan", "--hosts", "h", *arguments])
        assert capsys.readouterr().err == f"error: launch-ssh.sh: {message}\n"


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
def folder(tmp_path: Path) -> Path:
    """A plan folder for two hosts. Their launch.sh runs the file `program-RANK`."""
    folder = tmp_path / "plan"
    write_with_launcher(servers_of(1, 2), folder, "ssh")
    (tmp_path / "ssh").write_text('#!/bin/bash\nexec bash -c "${!#}"\n')
    (folder / "launch.sh").write_text('#!/bin/bash\n. "${0%/*}/program-$NODE_RANK"\n')
    for script in (tmp_path / "ssh", folder / "launch.sh"):
        script.chmod(0o755)
    return folder


def launch(folder: Path, hosts: str = "a\nb port=22 WORD=x", *options: str) -> Launch:
    (folder.parent / "hosts").write_text(hosts)
    words = ["--hosts", f"{folder}/../hosts", "--ssh", f"{folder}/../ssh", "--port=123", *options]
    return Launch(folder, *ssh_parser().parse_known_args(words))


def run(launch: Launch, first: str, second: str) -> int:
    for number, program in enumerate((first, second)):
        Path(launch.plan_folder, f"program-{number}").write_text(program)
    return Training(launch).run()


def test_the_first_failure_stops_the_others_and_is_the_status(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "POLL_S", 0.05)
    monkeypatch.setattr(ssh, "STOP_OTHERS_S", 0.5)
    until_stopped = "trap 'exit 5' TERM; while :; do sleep 0.05; done"
    assert run(launch(folder), until_stopped, "exit 4") == 4
    monkeypatch.setattr(ssh, "KILL_OTHERS_S", 1.0)
    assert run(launch(folder), until_stopped.replace("exit 5", ":"), "exit 4") == 4


def test_values_reach_the_host_as_they_are(folder: Path) -> None:
    out = folder / "out"
    record = f'printf \'%s|\' "$WORD" "$ALL" "$@" "$NNODES" "$MASTER_ADDR" "$MASTER_PORT" >\'{out}\''
    words = ("--env", "ALL='\"$x", "--run-dir", "a $b 'c'\n")
    assert run(launch(folder, "me@a\nb WORD=x", *words), "exit 0", record) == 0
    assert out.read_text() == "x|'\"$x|--run-dir|a $b 'c'\n|2|a|123|"


def test_a_host_has_its_own_port_folder_and_interpreter(folder: Path) -> None:
    started = launch(folder, "a\nb port=22 folder=~/b/c python=~/d/python")
    assert started.ssh(started.hosts[1], "x")[-5:-1] == ["-p", "22", "--", "b"]
    shown = b'printf "%s|" "${folder#"$HOME"}" "${PYTHON#"$HOME"}"\n'
    program = started.program(1).partition(b"if ! grep")[0] + shown
    assert subprocess.run(["bash"], input=program, capture_output=True, check=True).stdout == b"/b/c|/d/python|"


def test_hosts_and_plans_that_do_not_fit_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"the plan has 2 servers, and .*hosts names 1 hosts"):
        launch(folder, "a")
    assert run(launch(folder, "a\nb folder=/no/where"), "exit 0", "exit 0") == 2
    assert capfd.readouterr().err == "b: error: /no/where does not hold this plan: --copy brings it there\n"
    (folder.parent / "ssh").unlink()
    assert ssh.main([str(folder), "--hosts", f"{folder}/../hosts", "--ssh", "/no/ssh", "--copy"]) == 2
    assert capfd.readouterr().err == "error: /no/ssh: No such file or directory\n"

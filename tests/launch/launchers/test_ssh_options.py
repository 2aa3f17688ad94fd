"""The options of launch-ssh.sh, and its hosts file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.launchers.hosts_file import Host, read_hosts
from pipeplan_launch.launchers.ssh_connection import USAGE, SshOptions


def parse(*arguments: str, **environment: str) -> SshOptions:
    return SshOptions.parse(arguments, environment, "/work")


def test_options_that_are_not_known_go_to_launch_sh_in_their_order() -> None:
    options = parse("--epochs", "10", "--hosts=my hosts", "--label", "--seed=3", "--ssh", "ssh  -F config", "--copies")
    assert options.launch_arguments == ["--epochs", "10", "--seed=3", "--copies"]
    assert (options.hosts_file, options.label, options.copy) == ("my hosts", True, False)
    assert options.ssh == ["ssh", "-F", "config"]
    assert (options.workdir, options.grace, options.address, options.port) == ("/work", "300", "", "")


def test_the_environment_names_where_workers_meet_unless_an_option_does() -> None:
    environment = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert (parse(**environment).address, parse(**environment).port) == ("a", "1")
    options = parse("--address", "b", "--port=2", "--workdir=/tmp", "--grace", "7", **environment)
    assert (options.address, options.port, options.workdir, options.grace) == ("b", "2", "/tmp", "7")


def test_a_variable_without_a_value_has_that_of_this_machine() -> None:
    assert parse("--env", "A=b=c", "--env=B", B="d e").variables == ["A=b=c", "B=d e"]


def test_files_to_copy_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse("--with", "data/").copy_too == [str(tmp_path / "data")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "1=2"], "--env takes NAME or NAME=VALUE, not '1=2'"),
        (["--env", "NONE"], "--env NONE: this variable is not set here"),
        (["--with", "/no/where"], "--with /no/where: there is no such file or folder"),
        (["--with", "/"], "--with names a file to copy besides the plan: add --copy"),
        (["--epochs", "3", "--hosts"], "--hosts needs a value"),
        (["--grace", "0"], "--grace takes a number of seconds, not '0'"),
        (["--port", "ssh"], "the port must be a number, not 'ssh'"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str) -> None:
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-v", "'-v' is not the name of a host"),
        ("a port", "'port' is none of port=, folder=, python=, address= and NAME=VALUE"),
        ("a x=1", "'x=1' is none of port=, folder=, python=, address= and NAME=VALUE"),
    ],
)
def test_wrong_lines_are_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "hosts").write_text(f"a\n{line}\n")
    with pytest.raises(LaunchError) as error:
        read_hosts(str(tmp_path / "hosts"))
    assert str(error.value) == f"{tmp_path}/hosts, line 2: {message}"
    with pytest.raises(LaunchError, match="cannot read"):
        read_hosts(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "Is a directory"),
        ("pipe", "it is a device or a pipe, not a regular file"),
        ("/dev/zero", "it is a device or a pipe, not a regular file"),
        ("endless", "it has more than 1 MiB"),
    ],
)
def test_a_hosts_file_is_a_file_of_few_lines(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "endless").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(LaunchError) as error:
        read_hosts(str(tmp_path / name))
    assert str(error.value) == f"cannot read {tmp_path / name}: {message}"

"""Training on several hosts over ssh, where a bash on this machine stands in for ssh."""

from __future__ import annotations

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
from pipeplan_launch.launchers.hosts_file import Host
from pipeplan_launch.launchers.ssh import Training
from pipeplan_launch.launchers.ssh_connection import CHECK, Launch, host_program, ssh_command, start_ssh
from pipeplan_launch.launchers.ssh_requests import Abandoned, HostRequests, last_line


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


def test_ssh_gets_the_port_and_a_name_that_is_no_option(launch: Launch) -> None:
    assert ssh_command(launch, 1)[-5:-1] == ["-p", "22", "--", "b"]


def test_folders_and_interpreters_may_be_in_the_home_folder_of_the_host(launch: Launch) -> None:
    host = Host("b", folder="~/plans/a b", python="~/b c/python")
    launch = replace(launch, hosts=[launch.hosts[0], host])
    process = start_ssh(launch, 1, subprocess.PIPE, None)
    show = 'printf "%s|" "${folder#"$HOME"}" "${python#"$HOME"}"'
    assert process.communicate(host_program(launch, 1, show))[0] == b"/plans/a b|/b c/python|"


def test_a_command_that_is_not_there_is_named(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="cannot run /no/ssh: No such file or directory"):
        run(replace(launch, ssh=["/no/ssh"]), "", "")


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [(["10.0.0.1", "-"], "10.0.0.1"), (["-", "-"], "a"), (["127.0.0.1", "::1"], "127.0.0.1")],
)
def test_the_first_host_is_reached_where_ssh_reached_it(launch: Launch, addresses: list[str], expected: str) -> None:
    assert ssh_requests._address_of_first(launch, addresses) == expected


def test_a_loopback_address_is_no_meeting_point_for_other_machines(launch: Launch) -> None:
    with pytest.raises(
        LaunchError, match=r"ssh reaches a at 127\.0\.0\.1, where b cannot reach it: give its --address"
    ):
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

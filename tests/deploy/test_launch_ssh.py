"""launch-ssh.sh against a real ssh server, with keys, settings and a port of its own, for two hosts that are both this
machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from deployed import checkpoints, free_ports, page_blocks, rendered, runs, small_plan, summary, until, working_on

HOSTS = ("gpu1", "gpu2")


class Sshd:
    """The server. For the `ssh` in the folder `path`, to be put first on PATH, all `HOSTS` are this machine."""

    def __init__(self, folder: Path) -> None:
        daemon = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if daemon is None or not all(map(shutil.which, ("ssh", "ssh-keygen"))):
            pytest.skip("needs openssh-server and openssh-client")
        self._daemon = daemon
        self.folder, self.path = folder, folder / "bin"
        self._process: subprocess.Popen[bytes] | None = None
        self.path.mkdir(parents=True)
        (self.port,) = free_ports()

    def __enter__(self) -> Self:
        for name in ("host", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        settings = {
            "Port": self.port,
            "ListenAddress": "127.0.0.1",
            "HostKey": self.folder / "host",
            "AuthorizedKeysFile": self.folder / "key.pub",
            "StrictModes": "no",  # the folder may be in /tmp
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "yes",
            "PidFile": self.folder / "pid",
        }
        (self.folder / "sshd").write_text("".join(f'{name} "{value}"\n' for name, value in settings.items()))
        (self.folder / "ssh").write_text(
            f"Host {' '.join(HOSTS)}\n  HostName 127.0.0.1\n  Port {self.port}\n  IdentitiesOnly yes\n"
            f'  IdentityFile "{self.folder}/key"\n  UserKnownHostsFile "{self.folder}/known"\n'
            "  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
        )
        shim = self.path / "ssh"
        shim.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F "{self.folder}/ssh" "$@"\n')
        shim.chmod(0o755)
        if os.geteuid() == 0:
            # sshd confines its children there; the service of the package would make the folder
            Path("/run/sshd").mkdir(exist_ok=True)
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen([self._daemon, "-D", "-e", "-f", self.folder / "sshd"], stderr=log)
        deadline = time.monotonic() + 20
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                pytest.skip(f"sshd does not start here: {(self.folder / 'log').read_text().strip()}")
            time.sleep(0.02)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]
# Both hosts are this machine. PIPEPLAN_SERVER makes the executor take them for two.
HOST_FILE = f"# two\n{HOSTS[0]} PIPEPLAN_SERVER=a\n\n{HOSTS[1]} PIPEPLAN_SERVER=b # the other\n"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd") / "its own") as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a plan and a host file."""
    made = tmp_path / "a folder"
    small_plan(made / "plan", tmp_path / "a job" / "job.py")
    rendered(made / "plan", "ssh")
    (made / "hosts.txt").write_text(HOST_FILE)
    return made


class Script:
    """One run of the script."""

    def __init__(self, sshd: Sshd, folder: Path, *options: str) -> None:
        self.folder = folder
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
        environment["PATH"] = f"{sshd.path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            [folder / "plan" / "launch-ssh.sh", *options],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; the status and the output."""
        output, errors = self.process.communicate(timeout=240)
        return self.process.returncode, output, errors

    def wait_for_checkpoint(self) -> Path:
        """Wait for a checkpoint; returns the run folder."""

        def saved() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return any(checkpoints(run) for run in runs(self.folder / "plan"))

        until(saved, "checkpoint")
        return runs(self.folder / "plan")[0]


def test_the_page_of_ssh(sshd: Sshd, folder: Path, tmp_path: Path) -> None:
    """The commands of the page except solving, which `small_plan` does. The copies go to another folder."""
    (folder / "README.txt").write_text("to copy")
    first, second = page_blocks("test_launch_ssh.py")
    for commands, run in ((first, None), (second, folder / "run")):
        if run:
            (folder / "hosts.txt").write_text(HOST_FILE.replace("=b", f"=b folder={tmp_path}/there"))
        script = "\n".join(line for line in commands if not line.startswith("pipeplan solve"))
        done = subprocess.run(
            ["bash", "-euc", script.replace("render ssh", "render ssh --force")],
            cwd=folder,
            env={**os.environ, "PATH": f"{sshd.path}:{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "epoch 2/2" in done.stderr
        assert "predicted -> measured" in done.stdout
        ended = summary(run or runs(folder / "plan")[0])
        assert len(ended["epochs"]) == 2  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [
        *("launch-ssh.sh", "launch.sh", "plan.json", "stages"),
    ]


def test_ctrl_c_reaches_all_hosts_and_ends_at_a_checkpoint(sshd: Sshd, folder: Path) -> None:
    options = ("--hosts", "hosts.txt", "--epochs", "100000", "--log-every", "0", "--env", "SAMPLE_S=0.005")
    script = Script(sshd, folder, *options)
    run = script.wait_for_checkpoint()
    os.killpg(script.process.pid, signal.SIGINT)  # as a terminal does, to all processes of the group
    status, _, errors = script.end()
    assert status == 0, errors
    assert "stopped after epoch" in errors
    assert summary(run)["stopped"] is not None
    assert working_on(folder) == []


def test_nothing_outlives_the_script(sshd: Sshd, folder: Path) -> None:
    """The script is killed, and the hosts end their workers at a checkpoint."""
    options = ("--hosts", "hosts.txt", "--epochs", "100000", "--log-every", "0", "--checkpoint-every", "3")
    script = Script(sshd, folder, *options, "--env", "SAMPLE_S=0.01")
    run = script.wait_for_checkpoint()
    os.killpg(script.process.pid, signal.SIGKILL)
    script.process.communicate()
    until(lambda: not working_on(folder), "end of the workers")
    assert summary(run)["stopped"] is not None


def test_problems_of_hosts_are_reported_with_their_name(sshd: Sshd, folder: Path) -> None:
    plan, one, other = folder / "plan", f"{HOSTS[0]}\n", folder.parent / "other"
    shutil.copytree(plan, other)
    stage = other / "stages" / "stage-0.json"
    stage.write_text(stage.read_text().replace('"plan": "sha256:', '"plan": "sha256:0'))
    for second, options, message in (
        ("gpu2 port=1", (), "gpu2: ssh: connect to host 127.0.0.1 port 1: Connection refused"),
        ("gpu2 folder=/no/where", (), "gpu2: error: /no/where does not hold this plan: --copy brings it there"),
        (f"gpu2 folder={other}", (), f"gpu2: error: {other} does not hold this plan: --copy brings it there"),
        ("gpu2", ("--workdir", "/no/where"), "gpu1: bash: line "),
        ("gpu2", ("--epochz", "3"), "gpu1: error: launch.sh: there is no option --epochz; did you mean --epochs?"),
        ("-oProxyCommand=x", (), "error: hosts.txt, line 2: '-oProxyCommand=x' is not the name of a host"),
        ("", (), "error: the plan has 2 servers, and hosts.txt names 1 hosts"),
    ):
        (folder / "hosts.txt").write_text(one + second + "\n")
        status, _, errors = Script(sshd, folder, "--hosts", "hosts.txt", *options).end()
        assert status == 2, (second, options)
        assert message in errors, (second, options)
    assert not (plan / "runs").exists()

"""launch-ssh.sh, against an ssh server of our own, with two hosts that are both this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import checkpoints, page_blocks, rendered, runs, small_plan, summary, until, working_on
from sshd_here import HOSTS, Sshd

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]
# Where the hosts are one, each is to be taken for a machine of its own.
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


class Ran:
    """The script, from start to end."""

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
        """The status, and what was printed."""
        said, errors = self.process.communicate(timeout=240)
        return self.process.returncode, said, errors

    def trains(self) -> Path:
        """Wait for a checkpoint; the run folder."""

        def begun() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return any(checkpoints(run) for run in runs(self.folder / "plan"))

        until(begun, "checkpoint")
        return runs(self.folder / "plan")[0]


def test_the_page_of_ssh(sshd: Sshd, folder: Path, tmp_path: Path) -> None:
    """Its commands, but for solving, which `small_plan` has done; all but the plan is copied away from where it was."""
    (folder / "README.txt").write_text("to copy")
    first, second = page_blocks("how-to/ssh.md")
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
    ran = Ran(sshd, folder, "--hosts", "hosts.txt", "--epochs", "100000", "--env", "SAMPLE_S=0.005", "--log-every", "0")
    run = ran.trains()
    os.killpg(ran.process.pid, signal.SIGINT)  # as a terminal sends it: to ssh, too
    status, _, errors = ran.end()
    assert status == 0, errors
    assert "stopped after epoch" in errors
    assert summary(run)["stopped"] is not None
    assert working_on(folder) == []


def test_nothing_outlives_the_script(sshd: Sshd, folder: Path) -> None:
    """It is killed, as its machine may be, and the hosts end their workers at a checkpoint."""
    options = ("--hosts", "hosts.txt", "--epochs", "100000", "--log-every", "0", "--checkpoint-every", "3")
    ran = Ran(sshd, folder, *options, "--env", "SAMPLE_S=0.01")
    run = ran.trains()
    os.killpg(ran.process.pid, signal.SIGKILL)
    ran.process.communicate()
    until(lambda: not working_on(folder), "end of the workers")
    assert summary(run)["stopped"] is not None


def test_what_is_wrong_with_a_host_is_said_before_anything_trains(sshd: Sshd, folder: Path) -> None:
    plan, one, other = folder / "plan", f"{HOSTS[0]}\n", folder.parent / "other"
    shutil.copytree(plan, other)
    stage = other / "stages" / "stage-0.json"
    stage.write_text(stage.read_text().replace('"plan": "sha256:', '"plan": "sha256:0'))
    for second, options, said in (
        ("gpu2 port=1", (), "error: gpu2 cannot be reached: ssh: connect to host 127.0.0.1 port 1: Connection refused"),
        ("gpu2 folder=/no/where", (), "error: gpu2 has no folder /no/where; --copy brings the plan there"),
        (f"gpu2 folder={other}", (), f"error: gpu2 has another plan in {other}; --copy brings this one there"),
        ("gpu2 python=/bin/false", (), "error: gpu2: /bin/false cannot import pipeplan_launch: set PYTHON to an "),
        ("gpu2", ("--workdir", "/no/where"), "error: gpu1 has no folder /no/where to work in; --workdir names another"),
        ("gpu2", ("--epochz", "3"), "error: launch.sh: there is no option --epochz; did you mean --epochs?"),
        ("-oProxyCommand=x", (), "error: hosts.txt, line 2: '-oProxyCommand=x' is not the name of a host"),
        (
            "gpu2 colour=blue",
            (),
            "error: hosts.txt, line 2: 'colour=blue' is none of port=, folder=, python=, address=",
        ),
        ("", (), "error: the plan has 2 servers, and hosts.txt names 1 hosts"),
    ):
        (folder / "hosts.txt").write_text(one + second + "\n")
        status, _, errors = Ran(sshd, folder, "--hosts", "hosts.txt", *options).end()
        assert status == 2, (second, options)
        assert errors.startswith(said), (second, options)
        assert errors.count("\n") == (2 if "work in" in said else 1)
    assert not (plan / "runs").exists()

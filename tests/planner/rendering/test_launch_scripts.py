"""launch-ssh.sh with bash in place of ssh, and launch.slurm with stand-ins for SLURM's commands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_plans import outcome, servers_of, write_with_launcher

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.problem.problem import Problem

# A launch.sh that records its variables, then reports a reason against training.
RECORDING = """#!/bin/bash
printf '%s\\n' "$NODE_RANK" "$MASTER_PORT" "${PYTHON-}" >"$0.$NODE_RANK"
echo 'error: here it ends' >&2
exit 2
"""
# A launch.sh that passes the check, and then runs the file `program-RANK` in place of training.
PROGRAMMED = """#!/bin/bash
[[ -z "${PIPEPLAN_ONLY_CHECK:-}" ]] || exit 0
. "${0%/*}/program-$NODE_RANK"
"""
UNTIL_STOPPED = "trap 'echo checkpoint; exit 0' TERM; touch \"$0.trains-$NODE_RANK\"; while :; do sleep 0.05; done"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan folder for two servers, with launch-ssh.sh, and beside it a hosts file and `ssh`."""
    folder = tmp_path / "a plan"
    write_with_launcher(servers_of(1, 2), folder, "ssh")
    (folder / "launch.sh").write_text(RECORDING)
    (tmp_path / "ssh").write_text('#!/bin/bash\nexec bash -c "${!#}"\n')
    for script in (folder / "launch.sh", tmp_path / "ssh"):
        script.chmod(0o755)
    (tmp_path / "hosts").write_text("a python=~/b/python\nb python=/c/python\n")
    return folder


def start(plan: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [plan / "launch-ssh.sh", "--hosts", "hosts", "--ssh", "./ssh", *options],
        cwd=plan.parent,
        env={"PATH": "/usr/bin:/bin", "HOME": "/home/me", "TMPDIR": str(plan.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def train(plan: Path, first: str, second: str, *options: str) -> subprocess.Popen[str]:
    """Start the script on hosts that run these programs of bash in place of training."""
    (plan / "launch.sh").write_text(PROGRAMMED)
    (plan.parent / "hosts").write_text("a\nme@b\n")
    for number, program in enumerate((first, second)):
        (plan / f"program-{number}").write_text(program)
    return start(plan, *options)


def until(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(number: int) -> bool:
    """Whether a process is running. An orphan that has ended may stay as a zombie."""
    try:
        os.kill(number, 0)
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def test_hosts_are_checked_with_a_port_that_anybody_may_open(plan: Path) -> None:
    for options, port in (((), None), (("--port", "31234"), "31234")):
        _, errors = start(plan, *options).communicate(timeout=60)
        assert errors == "error: here it ends\n"
        first, second = ((plan / f"launch.sh.{number}").read_text().splitlines() for number in range(2))
        assert (first[0], second[0]) == ("0", "1")
        assert first[1] == port if port else 1024 <= int(first[1]) < 1 << 16
        assert (first[2], second[2]) == ("/home/me/b/python", "/c/python")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_no_check_outlives_the_script(plan: Path, sent: signal.Signals) -> None:
    (plan.parent / "ssh").write_text("#!/bin/bash\necho $$ >>asking\nsleep 100 & wait\n")
    script, asking = start(plan), plan.parent / "asking"
    until(lambda: asking.exists() and asking.read_text().count("\n") == 2)
    script.send_signal(sent)
    _, errors = script.communicate(timeout=60)
    assert (script.returncode, errors) == (130, "")
    until(lambda: not any(lives(int(number)) for number in asking.read_text().split()))
    assert not list(plan.parent.glob("tmp*"))


def ended(script: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The status of a script, and what it printed."""
    output, errors = script.communicate(timeout=60)
    return script.returncode, output, errors


TRAINED: tuple[tuple[str, str, tuple[int, str, str]], ...] = (
    ("exit 0", "exit 0", (0, "", "")),
    (
        "echo out; echo 'note: a note' >&2",
        "sleep 0.2; echo 'error: too late' >&2; echo plain >&2; exit 3",
        (3, "out\n", "note: a: a note\nerror: me@b: too late\nplain\n"),
    ),
    ("exit 0", "kill -KILL $$", (137, "", "error: me@b: launch.sh was ended by SIGKILL\n")),
    # The status of ssh for an error of its own.
    ("exit 0", "exit 255", (2, "", "error: me@b: the connection is lost\n")),
)
"""What two hosts run in place of training, and how the script ends."""


def test_problems_come_with_the_name_of_their_host_and_its_status(plan: Path) -> None:
    for first, second, expected in TRAINED:
        assert ended(train(plan, first, second)) == expected
    _, output, errors = ended(train(plan, "echo out; printf end", "sleep 0.2; echo error: x >&2", "--label"))
    assert (sorted(output.splitlines()), errors) == (["a: end", "a: out", "me@b: error: x"], "")


def test_a_request_to_stop_reaches_all_hosts_and_a_third_one_kills(plan: Path) -> None:
    for program, requests, expected in (
        (UNTIL_STOPPED, [signal.SIGINT], (0, "checkpoint\ncheckpoint\n")),
        (UNTIL_STOPPED.replace("exit 0", ":"), [signal.SIGTERM] * 3, (128 + signal.SIGKILL, None)),
    ):
        for started in plan.glob("launch.sh.trains-*"):
            started.unlink()
        script = train(plan, program, program)
        until(lambda: len(list(plan.glob("launch.sh.trains-*"))) == 2)
        for request in requests:
            script.send_signal(request)
            time.sleep(0.3)
        status, output, errors = ended(script)
        assert (status, output if expected[1] else None) == expected
        assert errors == "" or len(requests) > 1


def test_what_is_wrong_is_said_before_training(plan: Path) -> None:
    train(plan, "exit 0", "exit 0").communicate(timeout=60)
    (plan.parent / "hosts").write_text("a\nb python=/bin/false\n")
    assert ended(start(plan))[2] == (
        "error: b cannot import pipeplan_launch.launchers by /bin/false; python= in the hosts file names another "
        "interpreter\n"
    )
    stage = plan / "stages" / "stage-0.json"
    stage.write_text(stage.read_text().replace('"plan": "sha256:', '"plan": "sha256:0'))
    status, _, errors = ended(start(plan))
    assert (status, errors.startswith(f"error: the plan in {plan} is not the one that this file ")) == (2, True)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "/bin/false"}
    done = subprocess.run(["sh", plan / "launch-ssh.sh"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "error: /bin/false cannot import pipeplan_launch.launchers: set PYTHON to an interpreter that has pipeplan\n",
    )
    done = subprocess.run(["sh", plan / "launch-ssh.sh", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: launch-ssh.sh --hosts FILE [options] [options of launch.sh]\n")


def test_copying_leaves_runs_behind_and_says_where_it_fails(plan: Path, tmp_path: Path) -> None:
    train(plan, "", "").communicate(timeout=60)
    (plan / "runs").mkdir()
    (tmp_path / "hosts").write_text(f"a\nb folder={tmp_path}/copy\n")
    (tmp_path / "data").write_text("data")
    assert ended(start(plan, "--copy", "--with", "data"))[1:] == ("", "")
    assert set(os.listdir(tmp_path / "copy")) == set(os.listdir(plan)) - {"runs"}
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "copy").write_text("in the way")
    errors = ended(start(plan, "--copy"))[2]
    assert errors.startswith("error: b: nothing could be copied there: mkdir: ")
    assert errors.count("\n") == 1


JOB = 70123
STAND_INS = {
    # Prints the variables and arguments of srun, each on a line.
    "srun": 'printf "%s\\n" "$MASTER_ADDR" "$NNODES" "$@"',
    "scontrol": '[[ "$2" == job ]] && printf "   Command=%s --a b\\n" "$FILE" || printf "node7\\nnode8\\n"',
    "getent": "exit 0",
}


class Slurm:
    """A plan for two servers, and jobs that run it."""

    def __init__(self, folder: Path) -> None:
        self.plan, self.path = folder / "a plan", folder / "bin"
        write_with_launcher(servers_of(1, 2), self.plan, "slurm")
        self.path.mkdir()
        for name, text in STAND_INS.items():
            self.stand_in(name, text)

    def stand_in(self, name: str, text: str) -> None:
        (self.path / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.path / name).chmod(0o755)

    def launch_arguments(self, *options: str, restart: int = 0) -> list[str]:
        """Run a job; the arguments of launch.sh on every node."""
        lines = self.run_job(*options, restart=restart)
        assert lines[:2] == ["node7", "2"], lines
        return lines[lines.index(f"{self.plan}/launch.sh") + 1 :]

    def run_job(self, *options: str, restart: int = 0) -> list[str]:
        """Run a job from start to end; the lines that it prints."""
        script, copy = self.plan / "launch.slurm", self.plan.parent / "slurm_script"
        copy.write_text(script.read_text())  # SLURM runs a copy of launch.slurm
        environment = {"PATH": f"{self.path}:/usr/bin:/bin", "FILE": str(script)}
        environment |= {"SLURM_JOB_ID": str(JOB), "SLURM_JOB_NODELIST": "node[7-8]"}
        environment |= {"SLURM_RESTART_COUNT": str(restart)} if restart else {}
        command, captured = ["bash", copy, *options], {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, env=environment, check=True, cwd=copy.parent, **captured).stdout.splitlines()


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def test_a_step_that_ends_before_scancel_does_keeps_its_status(slurm: Slurm) -> None:
    """SLURM may be slow to pass a signal on: the step can end before scancel does."""
    slurm.stand_in(
        "srun",
        'run="${!#}"\nmkdir -p "$run"\nprintf \'"stopped": {}\' >"$run/summary.json"\n'
        'cd "$(dirname "$0")"\necho $$ >pid\nsleep 0.1\nkill -USR1 $PPID\n'
        "until [[ -f asked ]]; do sleep 0.02; done",
    )
    slurm.stand_in(
        "scancel", 'cd "$(dirname "$0")"\ntouch asked\nwhile kill -0 "$(<pid)" 2>/dev/null; do sleep 0.02; done'
    )
    slurm.stand_in("scontrol", f'if [[ "$1" == requeue ]]; then echo requeued; else {STAND_INS["scontrol"]}; fi')
    assert slurm.run_job()[0] == "requeued"


def test_components_are_one_step(slurm: Slurm) -> None:
    device = Device("d", "cpu", 10_000)
    servers = [Server(device, Level("server", size, 100.0)) for size in (2, 1)]
    profile = outcome().problem.profile
    uneven = Problem(profile, Cluster.of_servers("two", servers, [Level("cluster", 2, 10.0)]))
    write_with_launcher(uneven, slurm.plan, "slurm")
    words = slurm.run_job("--epochs", "2")[2:]
    assert words.count(":") == 1
    halves = words[: words.index(":")], words[words.index(":") + 1 :]
    assert [[word for word in half if "het" in word or "cpus" in word] for half in halves] == [
        ["--het-group=0", "--cpus-per-task=2"],
        ["--het-group=1", "--cpus-per-task=1"],
    ]
    assert halves[0][-4:-2] == halves[1][-4:-2] == ["--epochs", "2"]

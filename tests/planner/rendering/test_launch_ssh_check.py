"""launch-ssh.sh with bash on this machine in place of ssh: the checks of hosts, and the statuses of training."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_plans import servers_of, write_with_launcher

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


def test_a_host_without_the_executor_is_named(plan: Path) -> None:
    script = train(plan, "exit 0", "exit 0")
    assert script.communicate(timeout=60) == ("", "")
    (plan.parent / "hosts").write_text("a\nb python=/bin/false\n")
    _, errors = start(plan).communicate(timeout=60)
    assert errors == (
        "error: b cannot import pipeplan_launch.launchers by /bin/false; python= in the hosts file names another "
        "interpreter\n"
    )


def test_problems_come_with_the_name_of_their_host(plan: Path) -> None:
    first, second = "echo out; echo 'note: a note' >&2", "sleep 0.2; echo 'error: too late' >&2; echo plain >&2; exit 3"
    script = train(plan, first, second)
    output, errors = script.communicate(timeout=60)
    assert (script.returncode, output) == (3, "out\n")
    assert errors == "note: a: a note\nerror: me@b: too late\nplain\n"


def test_labels_are_on_every_line(plan: Path) -> None:
    script = train(plan, "echo out; printf end", "sleep 0.2; echo error: x >&2", "--label")
    output, errors = script.communicate(timeout=60)
    assert (sorted(output.splitlines()), errors) == (["a: end", "a: out", "me@b: error: x"], "")


def test_a_launch_that_was_killed_and_a_lost_connection_are_told_apart(plan: Path) -> None:
    script = train(plan, "exit 0", "kill -KILL $$")
    assert script.communicate(timeout=60)[1] == "error: me@b: launch.sh was ended by SIGKILL\n"
    assert script.returncode == 128 + signal.SIGKILL
    script = train(plan, "exit 0", "exit 255")  # the status of ssh for an error of its own
    assert script.communicate(timeout=60)[1] == "error: me@b: the connection is lost\n"
    assert script.returncode == 2


def test_a_request_to_stop_reaches_all_hosts(plan: Path) -> None:
    script = train(plan, UNTIL_STOPPED, UNTIL_STOPPED)
    until(lambda: len(list(plan.glob("launch.sh.trains-*"))) == 2)
    script.send_signal(signal.SIGINT)
    output, errors = script.communicate(timeout=60)
    assert (script.returncode, output, errors) == (0, "checkpoint\ncheckpoint\n", "")


def test_a_third_request_kills_what_does_not_end(plan: Path) -> None:
    stubborn = UNTIL_STOPPED.replace("exit 0", ":")
    script = train(plan, stubborn, stubborn)
    until(lambda: len(list(plan.glob("launch.sh.trains-*"))) == 2)
    for _ in range(3):
        script.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    script.communicate(timeout=60)
    assert script.returncode == 128 + signal.SIGKILL


def test_another_plan_is_refused(plan: Path) -> None:
    stage = plan / "stages" / "stage-0.json"
    stage.write_text(stage.read_text().replace('"plan": "sha256:', '"plan": "sha256:0'))
    script = start(plan)
    assert script.communicate(timeout=60)[1].startswith(f"error: the plan in {plan} is not the one that this file ")
    assert script.returncode == 2


def test_copying_leaves_runs_behind_and_says_where_it_fails(plan: Path, tmp_path: Path) -> None:
    (plan / "runs").mkdir()
    (plan / "program-0").touch()
    (plan / "program-1").touch()
    (plan / "launch.sh").write_text(PROGRAMMED)
    (tmp_path / "hosts").write_text(f"a\nb folder={tmp_path}/copy\n")
    (tmp_path / "data").write_text("data")
    script = start(plan, "--copy", "--with", "data")
    assert script.communicate(timeout=60) == ("", "")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == sorted(
        path.name for path in plan.iterdir() if path.name != "runs"
    )
    shutil.rmtree(tmp_path / "copy")
    (tmp_path / "copy").write_text("in the way")
    _, errors = start(plan, "--copy").communicate(timeout=60)
    assert errors.startswith("error: b: nothing could be copied there: mkdir: ")
    assert errors.count("\n") == 1


def test_the_script_needs_pipeplan_here(plan: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "/bin/false"}
    done = subprocess.run(["sh", plan / "launch-ssh.sh"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: /bin/false cannot import pipeplan_launch.launchers: set PYTHON to an interpreter that has pipeplan\n"
    )


def test_help_is_printed_without_hosts(plan: Path) -> None:
    done = subprocess.run(["sh", plan / "launch-ssh.sh", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: launch-ssh.sh --hosts FILE [options] [options of launch.sh]\n")

"""launch.slurm with stand-ins for SLURM's commands: the arguments of launch.sh when a job starts again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from small_plans import outcome, servers_of, write_with_launcher

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.problem.problem import Problem

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


def test_a_job_makes_its_own_run_and_finds_it_again(slurm: Slurm) -> None:
    *words, option, folder = slurm.launch_arguments("--epochs", "5", "--resume-from", "elsewhere")
    assert (words, option) == (["--epochs", "5", "--resume-from", "elsewhere"], "--run-dir")
    run = Path(folder)
    assert (run.parent, run.name[-len(f"Z-slurm-{JOB}") :]) == (slurm.plan / "runs", f"Z-slurm-{JOB}")
    run.mkdir(parents=True)
    # The job starts again before it has a checkpoint. The metrics of its first start stay in their folder.
    assert slurm.launch_arguments("--epochs", "5", restart=1) == ["--epochs", "5", "--run-dir", f"{run}-restart-1"]
    manifest = Path(f"{run}-restart-1", "checkpoints", "epoch-0001", "manifest.json")
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    resumed = ["--resume", "--epochs", "5", "--run-dir", f"{run}-restart-1"]
    for begun in (["--resume-from", "elsewhere"], ["--weights=elsewhere"]):
        assert slurm.launch_arguments("--epochs", "5", *begun, restart=2) == resumed


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

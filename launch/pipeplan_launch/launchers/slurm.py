"""`python -m pipeplan_launch.launchers.slurm …`: runs a plan as a SLURM job. launch.slurm calls it on the first node.

1. Find the plan folder, and refuse a plan other than the one that launch.slurm was rendered for.
2. Choose where the workers meet (`slurm_nodes`) and the run folder (`slurm_run_folder`).
3. Run launch.sh on all nodes, as one step. On a signal ask it to end at a checkpoint.
4. After the time limit, have SLURM queue the job again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from pipeplan_launch import launch_secret
from pipeplan_launch.errors import LaunchError, terminal_line
from pipeplan_launch.launchers.script_arguments import check_digest, parse_script_arguments
from pipeplan_launch.launchers.slurm_nodes import Component, output_lines, rendezvous_variables, srun_command
from pipeplan_launch.launchers.slurm_run_folder import JobRun, choose_run

INVALID = 2
TASK = 'export NODE_RANK="$SLURM_PROCID" PIPEPLAN_SERVER="$SLURMD_NODENAME"\nexec "$0" "$@"'
"""The task on every node. It tells launch.sh the number of its server, and names the server after the node."""
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class SlurmStep:
    """The srun that runs launch.sh on all nodes of the job."""

    def __init__(self, job: str, command: Sequence[str]) -> None:
        self._job = job
        self._requests: list[subprocess.Popen[bytes]] = []
        self.at_time_limit = False
        """Whether SLURM has announced the time limit."""
        try:
            self._process = subprocess.Popen(command)
        except OSError as error:
            raise LaunchError(f"cannot run {command[0]}: {error.strerror}") from error
        for number in _STOPPING:
            signal.signal(number, self._forward_stop)

    def wait(self) -> int:
        """Wait until the step ends; returns its exit status, 128 and more for a signal."""
        status = self._process.wait()
        for number in _STOPPING:  # queueing the job again sends SIGTERM
            signal.signal(number, signal.SIG_IGN)
        for request in self._requests:
            request.wait()
        return 128 - status if status < 0 else status

    def _forward_stop(self, number: int, _frame: FrameType | None) -> None:
        """Signal the tasks through SLURM, because srun itself would kill them after a signal.

        This does not wait for scancel, which may end after the step.
        """
        self.at_time_limit |= number == signal.SIGUSR1
        quiet = None if number == signal.SIGUSR1 else subprocess.DEVNULL
        self._requests.append(subprocess.Popen(["scancel", "--signal=TERM", self._job], stderr=quiet))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: facts of the plan, `--`, then arguments of launch.sh. Returns the job's exit status."""
    try:
        return _run(*_parse(sys.argv[1:] if arguments is None else arguments))
    except LaunchError as error:
        print(f"error: {terminal_line(error)}", file=sys.stderr)
        return INVALID


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The plan's facts, which launch.slurm contains, and the arguments of launch.sh."""
    parser = argparse.ArgumentParser(prog="python -m pipeplan_launch.launchers.slurm", allow_abbrev=False)
    parser.add_argument(
        "--component",
        dest="components",
        action="append",
        required=True,
        type=Component.parse,
        metavar="NODES:CORES",
        help="nodes that are alike, and the cores of a task on each",
    )
    parser.add_argument("--setup", default="", help="shell lines that run first on every node")
    parser.add_argument(
        "--at-time-limit",
        choices=("requeue", "advise", "end"),
        required=True,
        help="after the time limit: queue the job again, print how to go on, or do neither",
    )
    return parse_script_arguments(parser, arguments)


def _run(plan: argparse.Namespace, arguments: list[str]) -> int:
    job = os.environ["SLURM_JOB_ID"]
    folder = _plan_folder(plan.plan, job)
    check_digest(folder, plan.digest, "slurm")
    os.environ |= rendezvous_variables(job, plan.components, os.environ)
    os.environ.setdefault(launch_secret.VARIABLE, launch_secret.read_secret(os.environ) or launch_secret.new_secret())
    run = choose_run(folder, job, int(os.environ.get("SLURM_RESTART_COUNT") or 0), arguments)
    task = ["bash", "-c", f"{plan.setup}\n{TASK}" if plan.setup else TASK, f"{folder}/launch.sh", *run.arguments]
    step = SlurmStep(job, srun_command(plan.components, task, os.environ))
    status = step.wait()
    if step.at_time_limit and status == 0 and plan.at_time_limit != "end" and _stopped_early(run):
        return _continue_later(job, run, requeue=plan.at_time_limit == "requeue")
    return status


def _plan_folder(folder: str, job: str) -> str:
    """The plan folder. SLURM runs a copy of its launch.slurm; scontrol prints the original's path and arguments."""
    if not Path(folder, "launch.sh").is_file():
        lines = output_lines("scontrol", "show", "job", job)
        commands = (line.strip() for line in lines)
        path = next((line.removeprefix("Command=") for line in commands if line.startswith("Command=")), "")
        while not Path(path).is_file() and " " in path:
            path = path.rpartition(" ")[0]
        folder = os.path.dirname(path) or "."
    if not Path(folder, "launch.sh").is_file():
        raise LaunchError(f"{socket.gethostname()}: there is no plan in {folder}, which all nodes must see")
    return folder


def _stopped_early(run: JobRun) -> bool:
    """Whether training must continue: the run has no summary that says that it finished."""
    if not run.folder:
        return False
    try:
        return '"stopped": null' not in Path(run.folder, "summary.json").read_text(encoding="utf-8")
    except OSError:
        return True


def _continue_later(job: str, run: JobRun, *, requeue: bool) -> int:
    """Queue the job again, or print how the user can continue. Returns the exit status."""
    if requeue and subprocess.run(["scontrol", "requeue", job], check=False).returncode == 0:
        print("the time limit is reached: the job is queued again, and goes on from its checkpoint")
    else:
        print(f"the time limit is reached. To go on: sbatch … --resume --run-dir {shlex.quote(run.folder)}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback before there is a step to end
    sys.exit(main())

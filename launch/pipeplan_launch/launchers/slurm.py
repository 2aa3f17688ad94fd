"""`python -m pipeplan_launch.launchers.slurm …`: runs a plan as a SLURM job. launch.slurm calls it on the first node.

1. Find the plan folder, and refuse a plan other than the one that launch.slurm was rendered for.
2. Choose where the workers meet (`rendezvous_variables`) and the run folder (`choose_run`).
3. Run launch.sh on all nodes, as one step. On a signal, ask it to end at a checkpoint.
4. After the time limit, have SLURM queue the job again.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pipeplan_launch.elastic import handshake
from pipeplan_launch.errors import LaunchError, print_status
from pipeplan_launch.launchers.hosts_file import check_digest, parse_script_arguments
from pipeplan_launch.telemetry.run_folder import has_checkpoint

# The nodes of a SLURM job: where its workers meet, and the srun command that starts them.

FIRST_PORT = 20000
"""The port of a job is this number plus the last four digits of the job's number, or the next free port."""


@dataclass(frozen=True)
class Component:
    """Equal nodes of a job. A job with different nodes has several components (a heterogeneous job)."""

    nodes: int
    cores: int
    """Cores of the task on one node."""

    @classmethod
    def parse(cls, text: str) -> Component:
        """Parse `NODES:CORES`. Raises `ValueError`."""
        nodes, cores = map(int, text.split(":"))
        return cls(nodes, cores)


def rendezvous_variables(job: str, components: Sequence[Component], environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR, MASTER_PORT and NNODES for launch.sh. Call this on the first node. Raises `LaunchError`."""
    count = sum(component.nodes for component in components)
    nodes = environment.get("SLURM_JOB_NODELIST_HET_GROUP_0") or environment.get("SLURM_JOB_NODELIST", "")
    first = first_line("scontrol", "show", "hostnames", nodes)
    if not first:
        raise LaunchError("SLURM does not say which nodes the job has")
    has = environment.get("SLURM_JOB_NUM_NODES") or str(count)
    if len(components) == 1 and has != str(count):
        raise LaunchError(f"the plan is for {count} nodes, and the job has {has}")
    return {"MASTER_ADDR": _address(first), "MASTER_PORT": str(_free_port(job)), "NNODES": str(count)}


def srun_command(components: Sequence[Component], task: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command that runs `task` once on every node, as one step of the job."""
    if len(components) > 1:
        command = ["srun"]
        for group, component in enumerate(components):
            command += [*([":"] if group else []), f"--het-group={group}", "--export=ALL", "--ntasks-per-node=1"]
            command += [f"--cpus-per-task={component.cores}", "--kill-on-bad-exit=1", "--label", *task]
        return command
    (component,) = components
    nodes = [f"--nodes={component.nodes}", f"--ntasks={component.nodes}", "--ntasks-per-node=1"]
    label = ["--label"] if component.nodes > 1 else []
    cores = environment.get("SLURM_CPUS_PER_TASK") or str(component.cores)
    return ["srun", "--export=ALL", *nodes, "--kill-on-bad-exit=1", *label, f"--cpus-per-task={cores}", *task]


def first_line(*command: str) -> str:
    """The first line that a command prints; empty if it prints nothing, or cannot be run."""
    return next(output_lines(*command), "")


def output_lines(*command: str) -> Iterator[str]:
    """The lines that a command prints; none if it cannot be run."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="surrogateescape", check=False)
    except OSError:
        return
    yield from done.stdout.splitlines()


def _address(node: str) -> str:
    """A name or address by which other nodes reach `node`: some clusters have names that only SLURM knows."""
    known = subprocess.run(["getent", "hosts", node], stdout=subprocess.DEVNULL, check=False).returncode == 0
    if known:
        return node
    for line in output_lines("scontrol", "show", "node", node):
        if found := re.search(r"NodeAddr=(\S+)", line):
            return found[1]
    raise LaunchError(f"{node} has no address that the other nodes can reach: `scontrol show node` gives no NodeAddr")


def _free_port(job: str) -> int:
    """A free port of this machine. A restarted job gets the same port, unless it is no longer free."""
    port = FIRST_PORT + int(job) % 10000
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
        port += 1


# The choice of a SLURM job's run folder. A restarted job finds it by the number of the job in its name.

_STARTING_POINTS = ("--resume-from", "--weights", "--run-dir")
"""Options of launch.sh, each with a value, that are dropped when a job continues from its own checkpoint."""


@dataclass(frozen=True)
class JobRun:
    """The run folder of one start of a job."""

    folder: str
    """Empty if launch.sh chooses it."""
    arguments: list[str]
    """Arguments of launch.sh."""


def choose_run(plan_folder: str, job: str, restart: int, arguments: Sequence[str]) -> JobRun:
    """Choose the run folder of a job that has been restarted `restart` times.

    The first start makes a folder, unless the user named one, or `--resume` means the latest run of the plan. A later
    start continues from the last checkpoint of an earlier start. If there is none, it begins again in a new folder.
    """
    named, resumes = _run_options(arguments)
    if resumes and not named:
        return _latest_run(plan_folder, arguments)
    base = named or _folder_of_job(plan_folder, job)
    earlier = [base, *sorted(glob.glob(f"{glob.escape(base)}-restart-*"))]
    saved = [folder for folder in earlier if restart and has_checkpoint(Path(folder))]
    if saved:
        return JobRun(saved[-1], ["--resume", *_without_starting_point(arguments), "--run-dir", saved[-1]])
    folder = f"{base}-restart-{restart}" if restart and os.path.lexists(base) else base
    # launch.sh takes the last --run-dir.
    added = [] if folder == named else ["--run-dir", folder]
    return JobRun(folder, [*arguments, *added])


def _run_options(arguments: Sequence[str]) -> tuple[str, bool]:
    """(the value of the last `--run-dir`, or "", whether there is `--resume`)."""
    named = ""
    for word, following in itertools.pairwise([*arguments, ""]):
        if word == "--run-dir":
            named = following
        elif word.startswith("--run-dir="):
            named = word.removeprefix("--run-dir=")
    return named, "--resume" in arguments


def _latest_run(plan_folder: str, arguments: Sequence[str]) -> JobRun:
    """The run that launch.sh would resume, with its folder, so that this job still knows it after its time limit."""
    runs = sorted(glob.glob(os.path.join(glob.escape(plan_folder), "runs", "*")))
    saved = [folder for folder in runs if has_checkpoint(Path(folder))]
    if not saved:
        return JobRun("", list(arguments))
    return JobRun(saved[-1], [*arguments, "--run-dir", saved[-1]])


def _folder_of_job(plan_folder: str, job: str) -> str:
    """The run folder that an earlier start of the job made, or the name of a new one."""
    runs = os.path.join(plan_folder, "runs")
    made = [
        path for path in sorted(glob.glob(os.path.join(glob.escape(runs), f"*-slurm-{job}"))) if os.path.isdir(path)
    ]
    return made[0] if made else os.path.join(runs, f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-slurm-{job}")


def _without_starting_point(arguments: Sequence[str]) -> list[str]:
    """The arguments without the options `_STARTING_POINTS` and their values."""
    kept = []
    words = iter(arguments)
    for word in words:
        if word in _STARTING_POINTS:
            next(words, None)
        elif word != "--resume" and word.partition("=")[0] not in _STARTING_POINTS:
            kept.append(word)
    return kept


INVALID = 2
TASK = 'export NODE_RANK="$SLURM_PROCID" PIPEPLAN_SERVER="$SLURMD_NODENAME"\nexec "$0" "$@"'
"""The task on every node. It sets the number of launch.sh's server, and names the server after the node."""
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
        print_status(f"error: {error}")
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
    os.environ.setdefault(handshake.VARIABLE, handshake.read_secret(os.environ) or handshake.new_secret())
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

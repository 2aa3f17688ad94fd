"""launch.slurm in a real SLURM: a controller, and daemons that stand in for nodes, all on this machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from deployed import checkpoints, free_ports, page_blocks, rendered, runs, small_plan, summary

NODES, CPUS, GPUS = 3, 64, 4
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PATIENCE_S = 30
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} CPUs={cpus} Gres=gpu:v100:{gpus} \
Feature=fast
PartitionName=debug Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE
PartitionName=gpu Nodes=n[1-{nodes}] MaxTime=INFINITE
"""


class Slurm:
    """A SLURM cluster with its files in `folder`. Its commands need the variables in `environment`."""

    def __init__(self, folder: Path) -> None:
        self._search_path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        missing = [name for name in NEEDED if shutil.which(name, path=self._search_path) is None]
        if missing:
            pytest.skip(f"needs SLURM: {', '.join(missing)} not found (slurmctld, slurmd, slurm-client and munge)")
        if os.geteuid() != 0:
            pytest.skip("the daemons of SLURM need root")
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": self._search_path}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._stack = stack
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        subprocess.run(["scancel", "--user=root"], env=self.environment, check=False, capture_output=True)
        self.wait_until(lambda: not self.output("squeue", "-h"), "end of the jobs")
        self._stack.close()

    def _start(self) -> None:
        munge, gres = self.folder / "munge", self.folder / "gres.conf"
        munge.mkdir(parents=True, mode=0o700)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        places = (f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed"))
        self._daemon("munged", "--foreground", "--force", f"--socket={munge}/socket", *places)
        self.wait_until(lambda: (munge / "socket").exists(), "munge")
        host, ports = socket.gethostname(), free_ports(NODES + 1)
        # SLURM wants a device file for every GPU. Any device will do.
        devices = ("null", "zero", "full", "random")[:GPUS]
        gres.write_text("".join(f"Name=gpu Type=v100 File=/dev/{name}\n" for name in devices))
        numbers = {
            "ports": ports,
            "node_ports": ",".join(map(str, ports[1:])),
            "nodes": NODES,
            "cpus": CPUS,
            "gpus": GPUS,
        }
        (self.folder / "slurm.conf").write_text(CONFIG.format(host=host, folder=self.folder, **numbers))
        (self.folder / "state").mkdir()
        self._daemon("slurmctld", "-D", "-c")
        for number in range(1, NODES + 1):
            (self.folder / f"n{number}").mkdir()
            self._daemon("slurmd", "-D", "-N", f"n{number}")
        idle = ("sinfo", "-h", "-p", "debug", "-o", "%T %D")
        self.wait_until(lambda: self.output(*idle) == f"idle {NODES}", "idle nodes")

    def _daemon(self, name: str, *options: str) -> None:
        with (self.folder / f"{name}-{len(list(self.folder.glob('*.log')))}.log").open("wb") as log:
            process = subprocess.Popen(
                ["nice", shutil.which(name, path=self._search_path) or name, *options],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._stack.callback(_end, process)

    def output(self, *command: str | Path) -> str:
        """The output of a command of SLURM; empty if it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    def wait_until(self, condition: Callable[[], object], awaited: str, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in self.folder.glob("*.log"))
                pytest.fail(f"no {awaited}:\n{logs}")
            time.sleep(0.05)

    def state(self, job: str) -> str:
        """State of a job: PENDING, RUNNING, COMPLETED, …; empty if SLURM has forgotten it."""
        words = self.output("scontrol", "show", "job", job).split()
        return next((word.removeprefix("JobState=") for word in words if word.startswith("JobState=")), "")

    def has_step(self, job: str) -> bool:
        """Whether a daemon still runs a step of the job."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if path.read_bytes().startswith(f"slurmstepd: [{job}.".encode()):
                    return True
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


pytestmark = pytest.mark.deploy
JOB_PATIENCE_S = 150
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


class Job:
    """A job that runs a plan."""

    def __init__(self, slurm: Slurm, plan: Path, *options: str, **environment: str) -> None:
        self.slurm, self.plan = slurm, plan
        command, submitted = (
            ["sbatch", "--parsable", str(plan / "launch.slurm"), *options],
            slurm.environment | environment,
        )
        done = subprocess.run(command, cwd=plan.parent, env=submitted, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    @property
    def log(self) -> str:
        path = self.plan.parent / f"pipeplan-small-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def until(self, text: str) -> None:
        """Wait for a text in the log."""

        def logged() -> bool:
            assert self.slurm.state(self.number) not in ENDED or text in self.log, self.log
            return text in self.log

        self.slurm.wait_until(logged, f"{text!r} in {self.log}", JOB_PATIENCE_S)

    def end(self) -> str:
        """Wait for the end of the job; its state then."""
        self.slurm.wait_until(lambda: self.slurm.state(self.number) in ENDED, "end of the job", JOB_PATIENCE_S)
        return self.slurm.state(self.number)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return small_plan(tmp_path / "a folder" / "plan", tmp_path / "a job" / "job.py")


def test_the_page_of_slurm(slurm: Slurm, plan: Path) -> None:
    """The commands of the page except solving, which `small_plan` does. Only the first job runs."""
    environment = slurm.environment | {"PATH": f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"}
    for commands in page_blocks("test_launch_slurm.py"):
        script = "\n".join(line for line in commands if not line.startswith("pipeplan solve"))
        script = script.replace("sbatch --partition=debug", "sbatch --test-only --partition=debug")
        done = subprocess.run(
            ["bash", "-euc", script], cwd=plan.parent, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    slurm.wait_until(lambda: not slurm.output("squeue", "-h"), "end of the job", JOB_PATIENCE_S)
    (path,) = plan.parent.glob("pipeplan-small-*.log")
    log, (run,) = path.read_text(), runs(plan)
    assert summary(run)["stopped"] is None, log
    assert {"0: on n1", "1: on n2"} <= set(log.splitlines())
    assert "1: epoch 2/2" in log
    assert "0: predicted -> measured" in log
    assert run.name.endswith(f"-slurm-{path.stem.rpartition('-')[2]}")


def test_a_time_limit_ends_in_a_checkpoint_and_the_job_is_queued_again(slurm: Slurm, plan: Path) -> None:
    job, run, reached = _job_at_time_limit(slurm, plan)
    assert (summary(run)["stopped"] is not None, reached in checkpoints(run)) == (True, True)
    slurm.output("scancel", job.number)


@pytest.mark.slow
def test_the_queued_job_goes_on_from_the_checkpoint(slurm: Slurm, plan: Path) -> None:
    """SLURM waits for two minutes by default. Without that wait a busy SLURM can mix up the two starts.

    `test_launch_scripts.py` tests the second start without SLURM.
    """
    job, run, reached = _job_at_time_limit(slurm, plan)
    # In those two minutes all processes of the first start end.
    slurm.wait_until(lambda: not slurm.has_step(job.number), "end of the steps")
    # SLURM refuses a start in the second in which it revoked the credential of the one before.
    time.sleep(2)
    slurm.output("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    job.until(f"resumed from {run}/checkpoints/{reached}")
    slurm.wait_until(lambda: checkpoints(run)[-1] > reached, "checkpoint")
    slurm.output("scancel", job.number)
    assert job.end() == "CANCELLED"
    slurm.wait_until(lambda: "stopped after" in job.log.rpartition("resumed from")[2], "last checkpoint")
    assert runs(run.parents[1]) == [run]


def _job_at_time_limit(slurm: Slurm, plan: Path) -> tuple[Job, Path, str]:
    """A job in the queue after the signal of its time limit, its run folder, and the name of its checkpoint."""
    rendered(plan, "slurm")
    moved = plan.rename(plan.parent / "moved to")
    job = Job(slurm, moved, "--epochs", "100000", "--log-every", "0", SAMPLE_S="0.01")
    job.until("epoch 1/100000")
    # SLURM sends this signal before the time limit, which is at least a minute.
    slurm.output("scancel", "--batch", "--signal=USR1", job.number)
    job.until("the job is queued again")
    slurm.wait_until(lambda: slurm.state(job.number) == "PENDING", "queued job")
    (run,) = runs(moved)
    return job, run, checkpoints(run)[-1]


def test_servers_of_different_sizes_are_components_of_one_job(slurm: Slurm, tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "a folder" / "plan", tmp_path / "job.py", sizes=(2, 1))
    rendered(plan, "slurm")
    job = Job(slurm, plan, "--epochs", "1")
    assert job.end() == "COMPLETED", job.log
    ended = summary(runs(plan)[0])
    assert ended["server_sizes"] == [2, 1]
    assert len(ended["epochs"]) == 1  # type: ignore[arg-type]


def test_jobs_for_gpus_are_what_sbatch_accepts(slurm: Slurm, tmp_path: Path) -> None:
    """`--test-only` fails for resources that the cluster does not have."""
    settings = {"partition": "gpu", "account": "mine", "time": "12:00:00", "constraint": "fast", "mem": "0"}
    plan = small_plan(tmp_path / "plan", tmp_path / "job.py", device="cuda", sizes=(4, 4))
    for options, accepted in (
        (settings | {"gpu_type": "v100", "sbatch": ("--exclusive",)}, True),
        (settings | {"gpu_type": "h100"}, False),
        ({"partition": "nowhere"}, False),
    ):
        script = rendered(plan, "slurm", **options)
        command = ["sbatch", "--test-only", str(script)]
        done = subprocess.run(command, cwd=tmp_path, env=slurm.environment, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is accepted, done.stderr
        script.unlink()


def test_a_job_reports_errors_in_one_line(slurm: Slurm, plan: Path) -> None:
    rendered(plan, "slurm")
    alone = subprocess.run(["bash", plan / "launch.slurm"], capture_output=True, text=True, check=False)
    assert alone.returncode == 2
    assert "error: this is a job for SLURM: sbatch " in alone.stderr
    stage = plan / "stages" / "stage-0.json"
    stage.write_text(json.dumps(json.loads(stage.read_text()) | {"plan": "sha256:other"}))
    job = Job(slurm, plan, "--epochs", "1")
    assert job.end() == "FAILED"
    assert job.log.startswith(
        f"error: the plan in {plan} is not the one that this file was rendered for: run pipeplan "
    )
    assert runs(plan) == []

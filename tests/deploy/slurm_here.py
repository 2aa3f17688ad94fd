"""SLURM on this machine: a controller, and daemons that stand in for nodes, with all files in one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from deployed import free_ports

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

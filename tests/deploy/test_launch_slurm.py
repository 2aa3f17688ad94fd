"""launch.slurm in a real SLURM, whose nodes are all this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import checkpoints, page_blocks, rendered, runs, small_plan, summary
from slurm_here import Slurm

pytestmark = pytest.mark.deploy
PATIENCE_S = 150
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


class Job:
    """A job that runs a plan."""

    def __init__(self, slurm: Slurm, plan: Path, *options: str, **environment: str) -> None:
        self.slurm, self.plan = slurm, plan
        self.number = self._submit(environment, ["sbatch", "--parsable", str(plan / "launch.slurm"), *options])

    def _submit(self, environment: dict[str, str], command: list[str]) -> str:
        everything = self.slurm.environment | environment
        done = subprocess.run(
            command, cwd=self.plan.parent, env=everything, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @property
    def log(self) -> str:
        path = self.plan.parent / f"pipeplan-small-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def until(self, text: str) -> None:
        """Wait for a text in the log."""

        def logged() -> bool:
            assert self.slurm.state(self.number) not in ENDED or text in self.log, self.log
            return text in self.log

        self.slurm.wait_until(logged, f"{text!r} in {self.log}", PATIENCE_S)

    def end(self) -> str:
        """Wait for the end of the job; its state then."""
        self.slurm.wait_until(lambda: self.slurm.state(self.number) in ENDED, "end of the job", PATIENCE_S)
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
    slurm.wait_until(lambda: not slurm.output("squeue", "-h"), "end of the job", PATIENCE_S)
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

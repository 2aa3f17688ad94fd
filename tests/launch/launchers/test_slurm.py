"""launch.slurm's Python: the run folder of a job, its srun command, and where its workers meet."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.launchers import slurm
from pipeplan_launch.launchers.slurm import Component, choose_run, rendezvous_variables, srun_command
from pipeplan_launch.telemetry.run_folder import has_checkpoint


def checkpoint(run: Path) -> str:
    (run / "checkpoints" / "epoch-0001").mkdir(parents=True)
    (run / "checkpoints" / "epoch-0001" / "manifest.json").touch()
    return str(run)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return tmp_path / "a [plan]"


def test_which_run_folder_a_job_takes(plan: Path) -> None:
    run = choose_run(str(plan), "7", 0, ["--epochs", "2", "--resume-from", "x"])
    assert Path(run.folder).parent == plan / "runs"
    assert run.folder.endswith("Z-slurm-7")
    assert run.arguments == ["--epochs", "2", "--resume-from", "x", "--run-dir", run.folder]
    words = ["--run-dir", "a", "--run-dir=b"]
    run = choose_run(str(plan), "7", 0, words)
    assert (run.folder, run.arguments) == ("b", words), "the last one counts"
    assert choose_run(str(plan), "7", 0, ["--resume"]).arguments == ["--resume"]
    assert choose_run(str(plan), "7", 0, ["--resume"]).folder == ""
    older = checkpoint(plan / "runs" / "2025")
    latest = checkpoint(plan / "runs" / "2026")
    (plan / "runs" / "2027").mkdir()
    assert choose_run(str(plan), "7", 0, ["--resume"]).folder == latest
    assert [has_checkpoint(Path(run)) for run in (older, str(plan / "runs" / "2027"))] == [True, False]


def test_a_job_that_starts_again_goes_on_from_its_last_checkpoint(plan: Path) -> None:
    first = plan / "runs" / "2026-slurm-7"
    first.mkdir(parents=True)
    (plan / "runs" / "2026-slurm-77").mkdir()
    beside = f"{first}-restart-2"
    again = choose_run(str(plan), "7", 2, ["--epochs", "2"])
    assert (again.folder, again.arguments) == (beside, ["--epochs", "2", "--run-dir", beside])
    checkpoint(Path(beside))
    words = ["--weights", "w", "--epochs", "2", "--resume-from=x", "--run-dir=", "--seed=1"]
    again = choose_run(str(plan), "7", 3, words)
    assert (again.folder, again.arguments) == (
        beside,
        ["--resume", "--epochs", "2", "--seed=1", "--run-dir", beside],
    ), "it began at --weights, and is further by now"


def test_one_step_runs_on_all_nodes() -> None:
    one = srun_command([Component(2, 6)], ["task"], {})
    assert one == [
        *("srun", "--export=ALL", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--label"),
        *("--cpus-per-task=6", "task"),
    ]
    alone = srun_command([Component(1, 6)], ["task"], {"SLURM_CPUS_PER_TASK": "3"})
    assert ("--label" in alone, "--cpus-per-task=3" in alone) == (False, True)
    several = srun_command([Component.parse("2:6"), Component.parse("1:3")], ["task"], {"SLURM_CPUS_PER_TASK": "9"})
    assert several.count(":") == 1
    assert several[-1] == several[several.index(":") - 1] == "task"
    assert [word for word in several if "cpus" in word] == ["--cpus-per-task=6", "--cpus-per-task=3"]


def test_workers_meet_on_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "output_lines", lambda *command: iter(("n1", "n2") if "[" in command[-1] else ()))
    monkeypatch.setattr(slurm, "_address", lambda node: node)
    environment = {"SLURM_JOB_NODELIST": "n[1-2]"}
    components = [Component(2, 1)]
    variables = rendezvous_variables("70123", components, environment)
    assert (variables["MASTER_ADDR"], variables["NNODES"]) == ("n1", "2")
    assert int(variables["MASTER_PORT"]) >= 20123
    with pytest.raises(LaunchError, match="the plan is for 2 nodes, and the job has 3"):
        rendezvous_variables("1", components, environment | {"SLURM_JOB_NUM_NODES": "3"})
    with pytest.raises(LaunchError, match="SLURM does not say which nodes"):
        rendezvous_variables("1", components, {})
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = int(server.getsockname()[1])
        monkeypatch.setattr(slurm, "FIRST_PORT", taken)
        assert slurm._free_port("10000") > taken


def test_a_job_without_its_plan_is_one_line(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm, "output_lines", lambda *_: iter([f"   Command={plan}/launch.slurm --epochs 2"]))
    arguments = [f"--plan={plan}", "--digest=d", "--component=1:1", "--at-time-limit=end", "--", "--epochs", "2"]
    assert slurm.main(arguments) == 2
    host = socket.gethostname()
    # No such file: of the words of `Command=` none is the script, so that the path is cut to its first.
    assert capsys.readouterr().err.startswith(f"error: {host}: there is no plan in ")
    plan.mkdir()
    for name in ("launch.slurm", "launch.sh"):
        (plan / name).touch()
    assert slurm.main([arguments[0] + "-copy", *arguments[1:]]) == 2
    assert capsys.readouterr().err == (
        f"error: the plan in {plan} is not the one that this file was rendered for: run pipeplan export slurm --force\n"
    )

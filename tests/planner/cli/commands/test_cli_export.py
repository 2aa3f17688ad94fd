"""`pipeplan export`: its files, its output, and the plans that it refuses."""

from __future__ import annotations

from pathlib import Path

from commandline import Run, check_refusals, refused

from pipeplan.cli.commands.export import TARGETS
from pipeplan.exports import TARGET_NAMES
from pipeplan.exports.target import export_target

SOLVE = (*("solve", "mnist-v100", "--cluster", "local", "--workers", "2"), "--solver", "dp", "--stages")
FLUSH = ("2", "--schedule", "1f1b-flush", "--batch", "128")
FILES = {"pipeline.py", "schedule.csv"}


def test_the_files_are_written_beside_the_plan_once_and_listed(run: Run) -> None:
    assert run(*SOLVE, *FLUSH).code == 0
    done = run("export", "torch-pipelining")
    assert done.code == 0
    lines = done.err.splitlines()
    assert {line.split()[1] for line in lines[:-1]} == {f"plan/torch-pipelining/{name}" for name in FILES}
    assert all(line.startswith("written: ") and len(line.split(maxsplit=2)) == 3 for line in lines[:-1])
    assert lines[-1].startswith("next: import plan/torch-pipelining/pipeline.py in your training script")
    assert {path.name for path in Path("plan/torch-pipelining").iterdir()} == FILES

    line = refused(run, "export", "torch-pipelining")
    assert line == "plan/torch-pipelining/pipeline.py exists: give another folder with -o, or --force to replace it"
    Path("plan/torch-pipelining/schedule.csv").write_text("mine")
    Path("plan/torch-pipelining/notes").write_text("kept")
    assert run("export", "torch-pipelining", "plan", "--force").code == 0
    assert Path("plan/torch-pipelining/schedule.csv").read_text() != "mine"
    assert Path("plan/torch-pipelining/notes").read_text() == "kept"


def test_the_help_lists_the_targets_and_trainers_with_their_versions(run: Run) -> None:
    text = " ".join(run("export", "--help").out.partition("Commands:")[2].split())
    for name in TARGETS:
        assert f" {name} " in f" {text} "
    for name in TARGET_NAMES:
        assert f"{name} {export_target(name).title}" in text
        assert any(character.isdigit() for character in export_target(name).title)


def test_a_plan_that_the_trainer_cannot_express_is_refused_and_mistakes_end_in_one_line(run: Run) -> None:
    assert run(*SOLVE, "2", "--schedule", "1f1b-stashing").code == 0
    assert refused(run, "export", "torch-pipelining") == (
        "torch.distributed.pipelining of torch 2.13.0 cannot express the plan 1-1: its schedule 1f1b-stashing "
        "is asynchronous, and keeps versions of the weights; `pipeplan solve … --for torch-pipelining --batch SAMPLES` "
        "finds the best plan that it can"
    )
    said = {"torch-piplining": "there is no target 'torch-piplining'; did you mean 'torch-pipelining'"}
    said |= {"": "say what to export the plan for: local, ssh, slurm", "torchtitan nowhere": "nowhere has no plan.json"}
    check_refusals(run, {f"export {line}": text for line, text in said.items()})

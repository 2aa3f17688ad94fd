"""Every section of the gallery is what happens: its commands are run, its runs learn what it says, and so do their
weights in the plain module.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain import accuracy, plain
from shown import GALLERY, missing, sections, shape, transcripts

from pipeplan_launch.export import export_checkpoint
from pipeplan_launch.job.loading import load_job

LEARNED = {"mnist": 0.80, "resnet50": 0.70, "gpt": 0.33, "lstm": 0.70}
"""What plans of all kinds must reach on the test samples; who guesses has 0.1, 0.1, 0.15 and nothing."""


def run(command: str, folder: Path) -> str:
    """What a command prints, in the order in which a terminal shows it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "OMP_NUM_THREADS")}
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "118"}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.replace("/…", "/*")],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}"
    return ended.stdout


def test_every_job_has_a_section_with_commands_that_print_something() -> None:
    assert {file.stem for file in GALLERY.glob("*.py")} == {*LEARNED, "lora"}
    assert set(sections()) == set(LEARNED), "lora has a page of its own"
    for section in sections().values():
        assert [*transcripts(section)]
        for command, shown in transcripts(section):
            assert any(line != "…" and shape(line) for line in shown), command


@pytest.mark.gallery
@pytest.mark.parametrize("name", LEARNED)
def test_the_section_is_what_happens(name: str, tmp_path: Path) -> None:
    for file in GALLERY.glob("*.py"):
        shutil.copy(file, tmp_path)
    estimated: set[str] = set()
    for command, shown in transcripts(sections()[name]):
        words = command.split()
        if "--device" in words:
            estimated.add(words[words.index("-o") + 1])
        printed = run(command, tmp_path)
        absent = missing(shown, printed, exact=bool(estimated & {*words}))
        assert absent is None, f"{command}\ndoes not print\n{absent}\nbut\n{printed}"
    folder = next((tmp_path / "plan" / "runs").iterdir())
    epochs = json.loads((folder / "summary.json").read_text())["epochs"]
    reached = epochs[-1]["test_accuracy"]
    assert reached >= LEARNED[name]
    _the_weights_do_as_well_in_the_module(tmp_path / f"{name}.py", folder, reached)
    if name == "gpt":
        # The pipeline flushes: rounding apart, it computes what an ordinary loop does.
        curve = plain(f"{tmp_path / 'gpt.py'}:job", len(epochs), minibatches=2)
        assert [one["loss"] for one in epochs] == pytest.approx(curve.loss, rel=2e-3)
        assert [one["test_accuracy"] for one in epochs] == pytest.approx(curve.accuracy, abs=0.01)


def _the_weights_do_as_well_in_the_module(file: Path, run_folder: Path, expected: float) -> None:
    torch.set_num_threads(1)
    job = load_job(f"{file}:job", seed=7)
    before = accuracy(job)
    export_checkpoint(run_folder, file.with_suffix(".pt"))
    job.model.load_state_dict(torch.load(file.with_suffix(".pt"), weights_only=True))
    assert before < expected / 2
    assert accuracy(job) == pytest.approx(expected, abs=0.01)

"""Every section of the gallery is what happens: its commands are run and print what the page shows, its runs learn what
it says, and so do their weights in the plain module.

An ellipsis on a line by itself stands for lines that the page leaves out. What comes of an estimated profile is the
same everywhere, and is compared as it stands. What was measured is compared without its figures, and without what
follows from them: which layers a stage has, what binds.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from plain import accuracy, plain
from repository import ROOT
from saved import save
from stagewise import backward, forward, programs

from pipeplan_launch import export
from pipeplan_launch.export import export_checkpoint
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.runtime import stage_checkpoint
from pipeplan_launch.tracing.trace import trace_job

GALLERY = ROOT / "docs" / "gallery"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
TIMES = re.compile(r"\bDP [\d.]+ s|\(HiGHS\) [\d.]+ s")
"""What the solvers took."""
ROW = re.compile(r"^(\S+ {2,}\S.*?) +(?:[\d.]+ +){5}([\d.]+) +([\d.]+) +[\d.]+ +[\d.]+$")
"""A layer of a measured profile: name and operation, five figures of time, then sizes: output, weights, kept, work."""
DEPENDS = re.compile(r"^( *\d| +stage \d|Note:|note:|sum | +best uniform grid)")
"""Lines that another machine has in another number, or with other words."""
AFTER = ("bound by ", "measured on ", "first cause: ", "microbatch 32, on ", "microbatch 4, on ", "run folder")
"""What a line has behind these depends on the machine."""


def sections() -> dict[str, str]:
    """The section of each job of the gallery, by the name of the job's file."""
    _, *found = re.split(r"^## ", (GALLERY / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text for text in found for name in re.findall(r"\]\((\w+)\.py\)", text)[:1]}


def transcripts(section: str) -> Iterator[tuple[str, list[str]]]:
    """(command, lines shown below it)."""
    for block in BLOCK.findall(section):
        for one in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = one.splitlines()
            yield command, lines


def missing(shown: list[str], printed: str, *, exact: bool) -> str | None:
    """The first line of a page that does not come in its place in what was printed; None if all do."""
    form: Callable[[str], str | None] = _exact if exact else shape
    rest = iter([form(line) for line in printed.splitlines()])
    for line in shown:
        wanted = form(line)
        if line != "…" and wanted is not None and wanted not in rest:
            return line
    return None


def _exact(line: str) -> str:
    return TIMES.sub("time", line.rstrip())


def shape(line: str) -> str | None:
    """A line without what depends on the machine; None for one that does as a whole."""
    if DEPENDS.search(line):
        return None
    if found := ROW.match(line):
        line = " ".join(found.groups())
        return re.sub(r"\s+", " ", line)
    for words in AFTER:
        line = line.partition(words)[0]
    line = re.sub(r"\d[\d.]*(-\d+)*( (ms|µs|s)\b)?", "#", line)
    return re.sub(r"[\s─]+", " ", line).strip()


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


@pytest.mark.gallery
def test_adapters_train_in_two_stages_and_peft_loads_them(tmp_path: Path) -> None:
    """The page on LoRA: stages train adapters as the whole model does."""
    peft, reference, batch_size = pytest.importorskip("peft"), f"{GALLERY / 'lora.py'}:job", 2
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    job = load_job(reference, 0)
    whole, batch = copy.deepcopy(job.model).train(), job.example_batch(batch_size)
    traced = trace_job(job, batch_size, "module")
    names = [layer.name for layer in traced.layers]
    stages = programs(traced, [names[:5], names[5:]])
    for _ in range(2):
        optimizers = [
            job.make_optimizer([one for one in model.parameters() if one.requires_grad]) for model in (whole, job.model)
        ]
        expected = job.loss(whole(**dict(zip(traced.input_names, batch.inputs, strict=True))), batch.target)
        expected.backward()
        output, received, made = forward([stage.train() for stage in stages], list(batch.inputs), batch_size)
        loss = job.loss(output, batch.target)
        backward(loss, received, made)
        assert torch.equal(loss, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = {name: one for stage in stages for name, one in stage_checkpoint.model_state(stage).items()}
    save(tmp_path / "run", state, state_dict=stages[0].naming.state_dict, model_ref=reference)
    export.export_adapter(tmp_path / "run", tmp_path / "adapter")
    found = peft.PeftModel.from_pretrained(load_job(reference, 0).model.get_base_model(), str(tmp_path / "adapter"))
    written = peft.get_peft_model_state_dict(found)
    trained = peft.get_peft_model_state_dict(whole)
    assert written.keys() == trained.keys()
    assert all(torch.equal(written[name], trained[name]) for name in trained)

"""`import pipeplan`: the same answers as the command line, in the same words."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from commandline import Run

import pipeplan
from pipeplan import api
from pipeplan.from_options.option_fields import FLAGS, OptionKeywords

DP = ("--solver", "dp", "--no-write", "--json")


def test_the_package_has_every_name_of_the_api_and_no_module_in_its_place() -> None:
    for name in api.__all__:
        assert getattr(pipeplan, name) is getattr(api, name)
        assert importlib.util.find_spec(f"pipeplan.{name}") is None, f"import pipeplan.{name} would hide the function"
    assert set(api.__all__) <= set(dir(pipeplan))


def test_a_profile_is_saved_and_read_by_the_text_of_its_path(tmp_path: Path) -> None:
    profile = pipeplan.read_profile("vgg16-v100")
    profile.save(str(tmp_path / "profile.json"))
    assert pipeplan.Profile.load(str(tmp_path / "profile.json")) == profile


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ({}, []),
        ({"max_replicas": 1}, "--max-replicas 1"),
        ({"max_replicas": 1, "ignore_memory": True}, "--max-replicas 1 --ignore-memory"),
        ({"stages": 2, "pin": "conv2=1", "no_recompute": False}, "--stages 2 --pin conv2=1"),
        ({"schedule": "1f1b-flush", "batch": 256, "stages": 2}, "--schedule 1f1b-flush --batch 256 --stages 2"),
        ({"max_stages": 1, "batch": 64}, "--stages 1-1 --batch 64"),
        ({"batch": 64, "staleness": math.inf}, "--batch 64 --staleness any"),
        ({"microbatch": 32, "pins": (("conv1", 1),)}, "--microbatch 32 --pin conv1=1"),
    ],
    ids=lambda one: "" if isinstance(one, dict) else "-".join(one if isinstance(one, list) else one.split()) or "plain",
)
def test_a_plan_is_that_of_the_command_line(words: dict[str, object], arguments: list[str] | str, run: Run) -> None:
    settings = pipeplan.Settings(solver="dp", certify=False)
    mnist, cluster = pipeplan.read_profile("mnist-v100"), pipeplan.cluster("local", workers=2)
    found = pipeplan.solve(mnist, cluster, settings=settings, **words)  # type: ignore[arg-type]
    arguments = arguments if isinstance(arguments, list) else arguments.split()
    told = run("solve", "mnist-v100", "--cluster", "local", "--workers", "2", *arguments, *DP)
    document = json.loads(told.out)
    assert document["plan"]["config"] == found.plan.config
    assert document["prediction"]["minibatch_s"] == found.objective_s
    assert document["stated"]["minibatch_s"] == found.predicted_s
    assert (document["choice"] is None) is (found.choice is None) is ("schedule" in words)


def test_a_written_plan_is_simulated_as_the_solved_one(tmp_path: Path) -> None:
    here = pipeplan.cluster("local", workers=2)
    settings = pipeplan.Settings(solver="dp", certify=False, simulate=False)
    outcome = pipeplan.solve(pipeplan.read_profile("mnist-v100"), here, settings=settings)
    folder = pipeplan.render(outcome, tmp_path / "plan")
    from_folder, solved = pipeplan.simulate(folder, 50), pipeplan.simulate(outcome, 50)
    assert from_folder.report == solved.report
    assert (folder / "launch.sh").exists()
    with pytest.raises(pipeplan.InputError, match="already holds a plan"):
        pipeplan.render(outcome, folder)
    assert pipeplan.render(outcome, folder, force=True) == folder
    job = pipeplan.render_launcher("slurm", folder, partition="big")
    assert (job.parent, "--partition=big" in job.read_text()) == (folder, True)


def test_a_plan_for_another_trainer_is_exported(tmp_path: Path) -> None:
    words = {"target": "torch-pipelining", "batch": 64, "microbatch": 32}
    settings = pipeplan.Settings(solver="dp", certify=False, simulate=False)
    mnist, here = pipeplan.read_profile("mnist-v100"), pipeplan.cluster("local", workers=2)
    outcome = pipeplan.solve(mnist, here, settings=settings, stages=2, **words)  # type: ignore[arg-type]
    assert (outcome.plan.schedule in ("gpipe", "1f1b-flush"), outcome.plan.accumulate) == (True, 2)
    assert list(pipeplan.export("torch-pipelining", outcome, tmp_path / "made").iterdir())
    free = pipeplan.solve(mnist, here, settings=settings, stages=2, schedule="1f1b-stashing")
    with pytest.raises(pipeplan.InputError, match="cannot express"):
        pipeplan.export("torch-pipelining", free, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_each_mistake_is_one_line() -> None:
    for mistake in (
        lambda: pipeplan.cluster("nowhere"),
        lambda: pipeplan.cluster("A", workers=3),
        lambda: pipeplan.cluster("local", servers=2),
        lambda: pipeplan.read_profile("vgg61"),
        lambda: pipeplan.simulate("no-such-folder"),
        lambda: pipeplan.profile(lambda: None),
        lambda: pipeplan.profile(print),
        lambda: pipeplan.render_launcher("sulrm"),
        lambda: pipeplan.solve("profile.json", pipeplan.cluster("A")),  # type: ignore[arg-type]
        lambda: pipeplan.solve(pipeplan.read_profile("mnist-v100"), "A"),  # type: ignore[arg-type]
        lambda: pipeplan.solve(
            pipeplan.read_profile("mnist-v100"), pipeplan.cluster("A"), target="megatron", schedule="2bw", accumulate=4
        ),
    ):
        with pytest.raises(pipeplan.PipeplanError) as told:
            mistake()
        assert "\n" not in str(told.value)


def test_a_function_is_measured_as_the_file_that_it_stands_in_would_be(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(
        textwrap.dedent("""
            import torch
            from pipeplan_launch import Job

            def build():
                model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
                model.example_input_array = torch.zeros(8, 4)
                return model
        """)
    )
    specification = importlib.util.spec_from_file_location("tiny", tmp_path / "tiny.py")
    assert specification is not None
    assert specification.loader is not None
    tiny = importlib.util.module_from_spec(specification)
    sys.modules["tiny"] = tiny
    try:
        specification.loader.exec_module(tiny)
        profile = pipeplan.profile(tiny.build, repeats=1)
    finally:
        del sys.modules["tiny"]
    assert profile.model_ref == f"{tmp_path}/tiny.py:build"
    assert [layer.name for layer in profile.layers] == ["0", "1", "loss"]


def test_asking_for_the_version_imports_nothing_else() -> None:
    code = "import sys, pipeplan; pipeplan.__version__; print([n for n in sys.modules if n.startswith('pipeplan.')])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "['pipeplan._version']\n"


def test_the_typed_keywords_are_the_options() -> None:
    fields = {field.name for field in dataclasses.fields(pipeplan.Options)}
    assert set(OptionKeywords.__annotations__) == fields - {"sharding"} | set(FLAGS) | {"pin"}, (
        "--shard-optimizer asks for sharding"
    )

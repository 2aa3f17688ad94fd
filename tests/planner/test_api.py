"""`import pipeplan`: the same answers as the command line, in the same words."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandline import Run

import pipeplan
from pipeplan import api
from pipeplan.from_options.option_fields import FLAGS, OptionKeywords

DP = pipeplan.Settings(solver="dp", certify=False, simulate=False)
WORDS = ("--solver", "dp", "--no-write", "--json")


def _solved(workers: int = 3, settings: pipeplan.Settings = DP, **options: Any) -> pipeplan.Outcome:
    here = pipeplan.cluster("local", workers=workers)
    return pipeplan.solve(pipeplan.read_profile("mnist-v100"), here, settings=settings, **options)


@pytest.fixture(scope="module")
def outcome() -> pipeplan.Outcome:
    return _solved(stages=2, schedule="1f1b-stashing")


def test_the_package_has_every_name_of_the_api_and_no_module_in_its_place() -> None:
    for name in api.__all__:
        assert getattr(pipeplan, name) is getattr(api, name)
        assert importlib.util.find_spec(f"pipeplan.{name}") is None, f"import pipeplan.{name} would hide the function"
    assert set(api.__all__) <= set(dir(pipeplan))
    fields = {field.name for field in dataclasses.fields(pipeplan.Options)}
    assert set(OptionKeywords.__annotations__) == fields - {"sharding"} | set(FLAGS) | {"pin"}


SAME: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, ""),
    ({"max_replicas": 1, "ignore_memory": True}, "--max-replicas 1 --ignore-memory"),
    ({"stages": 2, "pin": "conv2=1", "no_recompute": False}, "--stages 2 --pin conv2=1"),
    ({"schedule": "1f1b-flush", "batch": 256, "stages": 2}, "--schedule 1f1b-flush --batch 256 --stages 2"),
    ({"max_stages": 1, "batch": 64}, "--stages 1-1 --batch 64"),
    ({"batch": 64, "staleness": math.inf}, "--batch 64 --staleness any"),
    ({"microbatch": 32, "pins": (("conv1", 1),)}, "--microbatch 32 --pin conv1=1"),
)


@pytest.mark.parametrize(("words", "arguments"), SAME, ids=[arguments or "plain" for _, arguments in SAME])
def test_a_plan_is_that_of_the_command_line(words: dict[str, Any], arguments: str, run: Run) -> None:
    found = _solved(2, dataclasses.replace(DP, simulate=True), **words)
    told = run("solve", "mnist-v100", "--cluster", "local", "--workers", "2", *arguments.split(), *WORDS)
    document = json.loads(told.out)
    assert document["plan"]["config"] == found.plan.config
    assert document["prediction"]["minibatch_s"] == found.objective_s
    assert document["stated"]["minibatch_s"] == found.predicted_s
    assert (document["choice"] is None) is (found.choice is None) is ("schedule" in words)


def test_a_written_plan_is_simulated_as_the_solved_one(tmp_path: Path) -> None:
    outcome = _solved(2)
    folder = pipeplan.render(outcome, tmp_path / "plan")
    assert pipeplan.simulate(folder, 50).report == pipeplan.simulate(outcome, 50).report
    with pytest.raises(pipeplan.InputError, match="already holds a plan"):
        pipeplan.render(outcome, folder)
    assert pipeplan.render(outcome, folder, force=True) == folder
    job = pipeplan.render_launcher("slurm", folder, partition="big")
    assert (job.parent, "--partition=big" in job.read_text()) == (folder, True)
    profile = outcome.problem.profile
    profile.save(str(tmp_path / "profile.json"))
    assert pipeplan.Profile.load(str(tmp_path / "profile.json")) == profile


def test_a_plan_for_another_trainer_is_exported(tmp_path: Path, outcome: pipeplan.Outcome) -> None:
    found = _solved(2, stages=2, target="torch-pipelining", batch=64, microbatch=32)
    assert (found.plan.schedule in ("gpipe", "1f1b-flush"), found.plan.accumulate) == (True, 2)
    assert list(pipeplan.export("torch-pipelining", found, tmp_path / "made").iterdir())
    with pytest.raises(pipeplan.InputError, match="cannot express"):
        pipeplan.export("torch-pipelining", outcome, tmp_path / "none")
    assert not (tmp_path / "none").exists()


MISTAKES: tuple[Callable[[], object], ...] = (
    lambda: pipeplan.cluster("A", workers=3),
    lambda: pipeplan.cluster("local", servers=2),
    lambda: pipeplan.read_profile("vgg61"),
    lambda: pipeplan.simulate("no-such-folder"),
    lambda: pipeplan.profile(lambda: None),
    lambda: pipeplan.profile(print),
    lambda: pipeplan.render_launcher("sulrm"),
    lambda: pipeplan.solve("profile.json", pipeplan.cluster("A")),  # type: ignore[arg-type]
    lambda: pipeplan.solve(pipeplan.read_profile("mnist-v100"), "A"),  # type: ignore[arg-type]
    lambda: _solved(target="megatron", schedule="2bw", accumulate=4),
)
OPTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"straight": True}, "there is no option 'straight'; did you mean 'stages'"),
    ({"grid": "yes"}, "grid: expected true or false, found 'yes'"),
    ({"staleness": "any"}, "staleness: expected a number of updates, or math.inf, found 'any'"),
    ({"staleness": -1}, "staleness: expected a number of updates, or math.inf, found -1"),
    ({"stages": 2.5}, "stages: "),
    ({"pin": "conv1"}, "expected a layer and a stage from 1 on, as in conv1=1, found 'conv1'"),
    ({"pin": 3}, "pin: expected a list, found 3"),
    ({"no_cut_after": "conv1"}, "no_cut_after: expected a list, found 'conv1'"),
    ({"schedule": 4}, "schedule: expected text, found 4"),
    ({"max_workers": 0}, "max_workers: "),
)


def test_each_mistake_is_one_line() -> None:
    refused = [(mistake, "") for mistake in MISTAKES]
    refused += [(lambda given=given: _solved(**given), said) for given, said in OPTIONS]
    for mistake, said in refused:
        with pytest.raises(pipeplan.PipeplanError) as told:
            mistake()
        assert said in str(told.value)
        assert "\n" not in str(told.value)


TINY = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    model.example_input_array = torch.zeros(8, 4)
    return model
"""


def test_a_function_is_measured_as_the_file_that_it_stands_in_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path)
    profile = pipeplan.profile(importlib.import_module("tiny").build, repeats=1)
    del sys.modules["tiny"]
    assert profile.model_ref == f"{tmp_path}/tiny.py:build"
    assert [layer.name for layer in profile.layers] == ["0", "1", "loss"]


def test_an_outcome_is_five_lines_a_table_and_rows(outcome: pipeplan.Outcome) -> None:
    lines = repr(outcome).split("\n")
    assert len(lines) == 5
    assert lines[0].startswith(f"Plan {outcome.plan.config} for training mnist, minibatch 32, on cluster local (2 of 3")
    assert lines[1].startswith("Asynchronous (1f1b-stashing)")
    assert f"bound by {outcome.evaluation.bound}" in lines[2]
    assert "x over data parallelism" in lines[3]
    assert lines[4] == f"Verdict: {outcome.verdict.text}"
    assert repr(_solved(stages=2, inference=True)).split("\n")[1] == "Inference: the forward pass only."
    page = outcome._repr_html_()
    assert page.count("<tr") == 1 + len(outcome.plan.stages)
    assert set(re.findall(r"<(\w+)", page)) == {"p", "b", "br", "table", "tr", "th", "td"}
    assert outcome.plan.stages[0].layers[0] in page
    rows = outcome.rows()
    assert [row["stage"] for row in rows] == [1, 2]
    assert [tuple(row["workers"]) for row in rows] == [stage.workers for stage in outcome.plan.stages]
    assert [row["compute_s"] for row in rows] == [cost.compute_s for cost in outcome.evaluation.stages]
    assert json.loads(json.dumps(rows)) == rows


def test_none_is_the_default_and_pins_add_up() -> None:
    options = _solved(stages=None, pins=[["conv1", 1]], pin=("conv2=1",), together=None).problem.options
    assert (options.pins, options.together) == ((("conv1", 1), ("conv2", 1)), ())


def test_an_explanation_is_that_of_the_command_line(tmp_path: Path, run: Run) -> None:
    outcome = pipeplan.solve(pipeplan.read_profile("mnist-v100"), pipeplan.cluster("C"), settings=DP)
    folder = pipeplan.render(outcome, tmp_path / "plan")
    told = json.loads(run("explain", str(folder), "--samples", "0", "--json").out)
    for subject in (outcome, folder):
        made = pipeplan.explain(subject, samples=0)
        assert made.plan == outcome.plan
        assert [load.name for load in made.loads] == [load["name"] for load in told["resources"]]
        assert made.alternatives.second is not None
        assert made.alternatives.second.plan.config == told["second_choice"]["config"]
    with pytest.raises(pipeplan.InputError, match=r"has no plan.json"):
        pipeplan.explain(tmp_path)


def test_a_sweep_is_that_of_the_command_line(run: Run) -> None:
    mnist, schedule = pipeplan.read_profile("mnist-v100"), ["1f1b-stashing"]
    words = "--servers 1,2 --memory 8GiB,16GiB --price 3 --schedule 1f1b-stashing --max-replicas 1 --json"
    told = json.loads(run("sweep", "mnist-v100", "--cluster", "A", *words.split()).out)["rows"]
    clusters = [pipeplan.cluster("A", servers=count) for count in (1, 2)]
    rows = pipeplan.sweep(mnist, clusters, memory=["8 GiB", 16 << 30], price=3.0, max_replicas=1, schedule=schedule)
    assert rows == told
    one = pipeplan.sweep(mnist, clusters[0], price=3.0, max_replicas=1, memory=["8GiB"], schedule=schedule)
    assert one == [{**told[0], "pareto": True}]
    slow = pipeplan.sweep(mnist, clusters[1], bandwidth={"cluster": ["1Gbit/s", 10e9 / 8]}, schedule=schedule)
    assert slow[0]["samples_per_s"] <= slow[1]["samples_per_s"]
    for mistake in ({"bandwidth": {"rack": ["1Gbit/s"]}}, {"memory": ["much"]}, {"grids": True}):
        with pytest.raises(pipeplan.InputError):
            pipeplan.sweep(mnist, clusters[0], **mistake)
    with pytest.raises(pipeplan.InputError, match="at least one cluster"):
        pipeplan.sweep(mnist, [])


def test_a_plan_is_made_again_for_what_is_left(tmp_path: Path, run: Run) -> None:
    mnist, options = pipeplan.read_profile("mnist-v100"), {"max_stages": 2, "schedule": "1f1b-stashing"}
    folder = pipeplan.render(pipeplan.solve(mnist, pipeplan.cluster("A"), settings=DP, **options), tmp_path / "plan")
    told = json.loads(run("replan", str(folder), "--lost", "server2", *WORDS).out)
    report = pipeplan.replan(folder, lost="server2", settings=DP)
    assert report.outcome.plan.config == told["now"]["config"]
    assert report.outcome.problem.options.max_stages == 2
    assert (report.folder, report.commands) == (None, [])
    free = pipeplan.replan(folder, lost=["server1", "worker0"], relax=["stages"], settings=DP, output=tmp_path / "b")
    assert (free.outcome.problem.options.max_stages, len(free.commands)) == (None, 3)
    assert (tmp_path / "b" / "launch.sh").exists()
    assert pipeplan.replan(folder, cluster=pipeplan.cluster("C"), settings=DP, max_replicas=1).outcome.plan.config
    for mistake, complaint in (
        ({}, "say what is gone"),
        ({"lost": "server9"}, "has no server 9"),
        ({"lost": "server1", "relax": ["stage"]}, "did you mean 'stages'"),
        ({"lost": "server1", "cluster": pipeplan.cluster("C")}, "give one of them"),
        ({"lost": "server1", "output": folder}, "already holds a plan"),
    ):
        with pytest.raises(pipeplan.InputError, match=complaint):
            pipeplan.replan(folder, settings=DP, **mistake)

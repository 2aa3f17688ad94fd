"""`explain`, `sweep` and `replan` in Python, options as on the command line, and an outcome as lines, HTML and rows."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from commandline import Run

import pipeplan

DP = pipeplan.Settings(solver="dp", certify=False, simulate=False)


def _solved(workers: int = 3, **options: Any) -> pipeplan.Outcome:
    here = pipeplan.cluster("local", workers=workers)
    return pipeplan.solve(pipeplan.read_profile("mnist-v100"), here, settings=DP, **options)


@pytest.fixture(scope="module")
def outcome() -> pipeplan.Outcome:
    return _solved(stages=2, schedule="1f1b-stashing")


def test_an_outcome_is_five_lines(outcome: pipeplan.Outcome) -> None:
    lines = repr(outcome).split("\n")
    assert len(lines) == 5
    assert lines[0].startswith(f"Plan {outcome.plan.config} for training mnist, minibatch 32, on cluster local (2 of 3")
    assert lines[1].startswith("Asynchronous (1f1b-stashing)")
    assert f"bound by {outcome.evaluation.bound}" in lines[2]
    assert "x over data parallelism" in lines[3]
    assert lines[4] == f"Verdict: {outcome.verdict.text}"
    assert repr(_solved(stages=2, inference=True)).split("\n")[1] == "Inference: the forward pass only."


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_a_table_with_a_row_for_each_stage(outcome: pipeplan.Outcome) -> None:
    page = _Tags(outcome._repr_html_())
    assert page.opened.count("tr") == 1 + len(outcome.plan.stages)
    assert set(page.opened) == {"p", "b", "br", "table", "tr", "th", "td"}
    assert outcome.plan.stages[0].layers[0] in page.text


def test_rows_have_every_stage_with_plain_values(outcome: pipeplan.Outcome) -> None:
    rows = outcome.rows()
    assert [row["stage"] for row in rows] == [1, 2]
    assert [tuple(row["workers"]) for row in rows] == [stage.workers for stage in outcome.plan.stages]
    assert [row["compute_s"] for row in rows] == [cost.compute_s for cost in outcome.evaluation.stages]
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"straight": True}, "there is no option 'straight'; did you mean 'stages'"),
        ({"grid": "yes"}, "grid: expected true or false, found 'yes'"),
        ({"staleness": "any"}, "staleness: expected a number of updates, or math.inf, found 'any'"),
        ({"staleness": -1}, "staleness: expected a number of updates, or math.inf, found -1"),
        ({"microbatch": 0}, "--microbatch must be at least 1 sample"),
        ({"stages": "two"}, "stages: expected a whole number, found 'two'"),
        ({"stages": 2.5}, "stages: "),
        ({"pin": "conv1"}, "expected a layer and a stage from 1 on, as in conv1=1, found 'conv1'"),
        ({"pin": 3}, "pin: expected a list, found 3"),
        ({"no_cut_after": "conv1"}, "no_cut_after: expected a list, found 'conv1'"),
        ({"schedule": 4}, "schedule: expected text, found 4"),
        ({"schedule": "gpip"}, "there is no schedule 'gpip'; did you mean 'gpipe'?"),
        ({"max_workers": 0}, "max_workers: "),
    ],
)
def test_options_are_refused_in_one_line(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(pipeplan.InputError) as told:
        _solved(**options)
    assert complaint in str(told.value)
    assert "\n" not in str(told.value)


def test_none_is_the_default_and_pins_add_up() -> None:
    options = _solved(stages=None, pins=[["conv1", 1]], pin=("conv2=1",), together=None).problem.options
    assert options.pins == (("conv1", 1), ("conv2", 1))
    assert options.together == ()


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
    mnist, words = pipeplan.read_profile("mnist-v100"), ("--servers", "1,2", "--memory", "8GiB,16GiB", "--price", "3")
    schedule = ["1f1b-stashing"]
    told = json.loads(
        run(
            "sweep", "mnist-v100", "--cluster", "A", *words, "--schedule", *schedule, "--max-replicas", "1", "--json"
        ).out
    )["rows"]
    clusters = [pipeplan.cluster("A", servers=count) for count in (1, 2)]
    rows = pipeplan.sweep(mnist, clusters, memory=["8 GiB", 16 << 30], price=3.0, max_replicas=1, schedule=schedule)
    assert rows == told
    assert pipeplan.sweep(mnist, clusters[0], price=3.0, max_replicas=1, memory=["8GiB"], schedule=schedule) == [
        {**told[0], "pareto": True}
    ]
    slow = pipeplan.sweep(mnist, clusters[1], bandwidth={"cluster": ["1Gbit/s", 10e9 / 8]}, schedule=schedule)
    assert slow[0]["samples_per_s"] <= slow[1]["samples_per_s"]
    for mistake in ({"bandwidth": {"rack": ["1Gbit/s"]}}, {"memory": ["much"]}, {"grids": True}):
        with pytest.raises(pipeplan.InputError):
            pipeplan.sweep(mnist, clusters[0], **mistake)
    with pytest.raises(pipeplan.InputError, match="at least one cluster"):
        pipeplan.sweep(mnist, [])


def test_a_plan_is_made_again_for_what_is_left(tmp_path: Path, run: Run) -> None:
    mnist, options = pipeplan.read_profile("mnist-v100"), {"max_stages": 2, "schedule": "1f1b-stashing"}
    before = pipeplan.solve(mnist, pipeplan.cluster("A"), settings=DP, **options)
    folder = pipeplan.render(before, tmp_path / "plan")
    words = ("--solver", "dp", "--no-write", "--json")
    told = json.loads(run("replan", str(folder), "--lost", "server2", *words).out)
    report = pipeplan.replan(folder, lost="server2", settings=DP)
    assert report.outcome.plan.config == told["now"]["config"]
    assert report.outcome.problem.options.max_stages == 2
    assert (report.folder, report.commands) == (None, [])
    free = pipeplan.replan(folder, lost=["server1", "worker0"], relax=["stages"], settings=DP, output=tmp_path / "b")
    assert free.outcome.problem.options.max_stages is None
    assert (tmp_path / "b" / "launch.sh").exists()
    assert len(free.commands) == 3
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

"""`pipeplan simulate` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, check_refusals, refused, run_once

from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

WIDTH = 80


@pytest.fixture
def planned(run: Run) -> Path:
    """A folder with a plan of several stages."""
    profile = Profile(
        layers=(Layer("a", 1.0, 2.0, 100, 10), Layer("b", 1.5, 3.0, 10**12, 4)),
        tensors=(Tensor("x", "a", ("b",), 10**9, 10**9),),
        minibatch=4,
        model_name="small",
    )
    profile.save(Path("profile.json"))
    given = ("--cluster", "A", "--servers", "2", "--ignore-memory", "--schedule", "1f1b-stashing")
    assert run_once(run, "solve", *given, "--solver", "dp").code == 0
    return Path("plan")


def _change(folder: Path, *keys: str | int, to: Any) -> None:
    """Set a field of plan.json."""
    document = json.loads((folder / "plan.json").read_text())
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    (folder / "plan.json").write_text(json.dumps(document))


def test_it_tells_the_step_time_and_draws_the_workers(run: Run, planned: Path) -> None:
    done = run("simulate", "plan")
    assert done.code == 0, done.err
    assert "in the steady state, 1.000 of the predicted" in " ".join(done.out.split())
    assert "Fill " in done.out
    assert "Links busy" in done.out
    for mark in ("F0", "B0=", "computing", "peak"):
        assert mark in done.out
    workers = sum(len(stage["workers"]) for stage in json.loads((planned / "plan.json").read_text())["plan"]["stages"])
    assert sum(line.startswith("w") for line in done.out.splitlines()) == workers
    assert max(map(len, done.out.splitlines())) <= WIDTH
    assert "\x1b" not in done.out, "no colours where nobody sees them"


def test_json_and_a_trace(run: Run, planned: Path) -> None:
    done = run("simulate", "plan", "--json", "--trace", "made/trace.json", "--microbatches", "300")
    report = json.loads(done.out)
    assert (report["format"], report["version"], report["minibatches"]) == ("pipeplan-simulation", 1, 300)
    assert report["ratio"] == pytest.approx(1.0, rel=0.01)
    assert all(stage["peak_in_flight"] <= stage["depth"] for stage in report["stages"])
    assert json.loads(Path("made/trace.json").read_text())["traceEvents"]
    assert run("simulate", "plan", "--trace", "made/trace.json").code == 0
    line = refused(run, "simulate", "plan", "--trace", "plan/plan.json")
    assert line.startswith("plan/plan.json exists and is not a trace: give another file with --trace")
    again = run("simulate", "plan", "--json", "--microbatches", "300")
    assert again.out == done.out


def test_too_few_microbatches_are_said_to_be(run: Run, planned: Path) -> None:
    assert "too few for a steady state" in run("simulate", "plan", "--microbatches", "1").out
    assert json.loads(run("simulate", "plan", "--microbatches", "1", "--json").out)["steady"] is None


DAMAGES: tuple[tuple[tuple[str | int, ...], Any, str], ...] = (
    (("version",), 2, "plan.json is version 2 of pipeplan-plan; this pipeplan reads up to 1"),
    (("format",), "else", "is not a pipeplan-plan file"),
    (("plan", "stages"), [], "the plan has no stages"),
    (("plan", "stages", 0, "workers"), [], "every stage needs a worker"),
    (("plan", "stages", 0, "workers"), [99], "there is no worker 99"),
    (("plan", "stages", 0, "depth"), 0, "depth: expected at least 1"),
    (("plan", "copies"), 0, "copies: expected at least 1"),
    (("prediction", "stages", 0, "forward_s"), -1.0, "forward_s: expected at least 0, found -1"),
    (("prediction", "stages", 0, "forward_s"), "soon", "forward_s: expected a number"),
    (("prediction", "stages", 0, "forward_s"), 1e308, "at most 9.2"),
    (("prediction", "stages"), [], "one for each stage, found 0"),
    (("options", "overlap"), 1.5, "the overlap must lie between 0 and 1"),
    (("cluster", "levels", 1, "bandwidth"), 0, "zero bandwidth"),
    (("cluster", "levels"), [], "has no levels"),
)


def test_a_damaged_plan_is_one_line(run: Run, planned: Path) -> None:
    whole = (planned / "plan.json").read_text()
    for keys, value, expected in DAMAGES:
        (planned / "plan.json").write_text(whole)
        _change(planned, *keys, to=value)
        assert expected in refused(run, "simulate", "plan")


def test_a_folder_without_a_plan_is_one_line(run: Run, planned: Path) -> None:
    assert run("simulate", "nowhere").err == "error: nowhere does not exist; `pipeplan solve` writes plan folders\n"
    Path("empty").mkdir()
    whole = (planned / "plan.json").read_text()
    (planned / "plan.json").write_text(whole[: len(whole) // 2])
    refusals = {"empty": "empty has no plan.json", "profile.json": "is not a folder", "plan": "is it truncated?"}
    refusals |= dict.fromkeys(("plan --microbatches 0", "plan --microbatches many"), "")
    check_refusals(run, {f"simulate {line}": said for line, said in refusals.items()})
    (planned / "plan.json").write_text(whole)
    (planned / "stages" / "stage-0.json").unlink()
    assert "stages/stage-0.json is missing" in refused(run, "simulate", "plan")

"""The self-test: its reference tells schedules apart, its runs pass here, and a launch uses what it has found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_workers import stage_contents, write_plan

from pipeplan_launch import preflight
from pipeplan_launch.devices import selftest_cache
from pipeplan_launch.plan.run_options import MODES, GradientAveraging, transport_of
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_measure import selftest
from pipeplan_measure.selftest import Result, cases, compare, try_case, verdict
from pipeplan_measure.selftest_reference import Case, Losses, reference_losses

CPU = torch.device("cpu")
STASHING = Case((1, 1), "1f1b-stashing")


def test_the_reference_tells_schedules_apart() -> None:
    """A run under a wrong schedule, with one update left out, or with a loss that is no number is noticed."""
    names = ("1f1b-stashing", "vertical-sync", "2bw", "gpipe")
    losses = {name: reference_losses(Case((1, 1), name), CPU) for name in names}
    for name in names:
        assert compare(losses[name], losses[name]) == (
            True,
            "16 losses and the test loss equal those of one process, bit by bit",
        )
        others = [other for other in names if other != name]
        assert not any(compare(losses[name], losses[other])[0] for other in others if {name, other} != set(names[:2]))
    right = losses["gpipe"]
    assert reference_losses(Case((1,), "gpipe"), CPU) == right, "with a flush, stages make no difference"
    wrong_end = Losses(right.minibatches, [*right.means[:-1], right.means[-1] * (1 + 1e-6)])
    assert not compare(wrong_end, right)[0]
    assert not compare(Losses([float("nan"), *right.minibatches[1:]], right.means), right)[0]
    assert not compare(Losses(right.minibatches[:-1], right.means), right)[0]


def test_what_is_run_covers_schedules_and_ways(tmp_path: Path) -> None:
    found = cases(2)
    assert {one.transport for one in found} == {"gloo", "nccl"}
    assert {one.schedule for one in found} == {"1f1b-stashing", "vertical-sync", "2bw", "gpipe", "1f1b-flush"}
    assert any(one.is_killed for one in found)
    assert all(sum(one.replicas) <= 2 for one in found)
    assert {one.replicas for one in cases(5)} == {(1,), (2,), (1, 1), (2, 1), (1, 2), (2, 2), (3, 2)}
    assert [one.replicas for one in cases(1)] == [(1,)]
    for number, case in enumerate(cases(5)):
        plan = load_plan(selftest.write_plan(tmp_path / str(number), case, "cuda"))
        assert plan.written() == "-".join(map(str, case.replicas))


def results(*passed: bool) -> list[tuple[Case, Result]]:
    modes = ("nccl", "gloo")
    return [(replace(STASHING, transport=mode), Result("", ok, "")) for mode, ok in zip(modes, passed, strict=False)]


def test_the_verdict_is_nccl_where_all_its_runs_passed() -> None:
    modes = {(True, True): "nccl", (False, True): "gloo", (True, False): "nccl", (): "gloo", (True,): "nccl"}
    for passed, mode in modes.items():
        assert verdict(results(*passed), "cuda") == mode
        assert verdict(results(*passed), "cpu") == "gloo"
    assert verdict([*results(True, False), *results(False)], "cuda") == "gloo"


def test_what_was_found_is_remembered_for_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert selftest_cache.remembered_transport(MODES) is None
    path = selftest_cache.remember("nccl")
    assert path == tmp_path / "pipeplan" / "selftest.json"
    assert selftest_cache.remembered_transport(MODES) == "nccl"
    monkeypatch.setattr(selftest_cache, "nccl_version", lambda: "9.9")
    assert selftest_cache.remembered_transport(MODES) is None, "another NCCL may do otherwise"
    path.write_text("[]")
    assert selftest_cache.remembered_transport(MODES) is None
    selftest_cache.remember("host")
    assert selftest_cache.remembered_transport(MODES) is None, "modes of earlier versions are tried anew"


def plan_on_gpus(folder: Path, replicas: list[int], servers: int = 1) -> Any:
    contents = stage_contents(replicas)
    return load_plan(write_plan(folder, [one | {"device": "cuda", "servers": servers} for one in contents]))


def test_a_run_on_the_gpus_of_one_server_uses_what_was_found(tmp_path: Path) -> None:
    exact = GradientAveraging()
    for number, (replicas, servers, mode) in enumerate([([1, 1], 1, "nccl"), ([2], 1, "gloo"), ([1, 1], 2, "gloo")]):
        plan = plan_on_gpus(tmp_path / str(number), replicas, servers)
        assert transport_of("auto", plan, exact, "nccl") == mode
        assert transport_of("auto", plan, exact, None) == "gloo"
    on_cpus = load_plan(write_plan(tmp_path / "cpu", stage_contents([1, 1])))
    assert transport_of("auto", on_cpus, exact, "nccl") == "gloo"
    assert transport_of("nccl", on_cpus, exact) == "nccl"


def test_a_first_launch_on_gpus_tries_messages_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan, started = plan_on_gpus(tmp_path, [1, 1]), []
    report = {"results": [{"name": "1-1, nccl", "passed": False, "text": "it hung"}], "transport": "gloo"}

    def run(command: list[str], **_: Any) -> Any:
        started.append(command[1:])
        return SimpleNamespace(stdout=json.dumps(report) + "\n", returncode=2)

    monkeypatch.setattr(subprocess, "run", run)
    options = SimpleNamespace(
        no_selftest=False, transport="auto", compress=None, significance=None, shard_optimizer=False
    )
    note = preflight.self_test_note(options, plan, 2)  # type: ignore[arg-type]
    assert note == "note: messages between stages will travel by --transport gloo (1-1, nccl: it hung)"
    assert started == [["-m", "pipeplan_measure.selftest", "--short"]]
    for other, gpus in (({"no_selftest": True}, 2), ({"transport": "nccl"}, 2), ({"compress": "bf16"}, 2), ({}, 1)):
        asked = SimpleNamespace(**vars(options) | other)
        assert preflight.self_test_note(asked, plan, gpus) is None  # type: ignore[arg-type]
    selftest_cache.remember("gloo")
    assert preflight.self_test_note(options, plan, 2) is None  # type: ignore[arg-type]
    assert len(started) == 1
    monkeypatch.setattr(selftest_cache, "remembered_transport", lambda _modes: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="", returncode=1))
    assert "gave no answer" in (preflight.self_test_note(options, plan, 2) or "")  # type: ignore[arg-type]


SLOW = [one for one in cases(3) if one != Case((2, 1), "1f1b-stashing", "nccl")]


@pytest.mark.parametrize("case", [pytest.param(one, marks=pytest.mark.slow) for one in SLOW], ids=lambda one: one.name)
def test_the_runs_pass_here(case: Case, tmp_path: Path) -> None:
    result = try_case(case, "cpu", tmp_path / "plan", patience_s=300)
    assert result.passed, result.text


def test_a_run_in_the_one_order_passes_and_one_that_cannot_start_fails(tmp_path: Path) -> None:
    right = Case((2, 1), "1f1b-stashing", "nccl")
    result = try_case(right, "cpu", tmp_path / "right", patience_s=300)
    assert result.passed, result.text
    wrong = try_case(replace(right, transport="none"), "cpu", tmp_path / "wrong", patience_s=300)
    assert not wrong.passed
    assert "--transport" in wrong.text


@pytest.mark.slow
def test_the_command_prints_one_line_of_json() -> None:
    command = [sys.executable, "-m", "pipeplan_measure.selftest", "--device", "cpu", "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert all(one["passed"] for one in report["results"])
    assert (report["device"], report["transport"], report["remembered"]) == ("cpu", "gloo", None)

"""Uniform grids: what they are restricted to, beside a plan and on request, and solving for trainers that need one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checking import changed, findings, written
from commandline import Ran, Run
from extents import slow_but_for
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cluster_data.cluster_toml import cluster_toml
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.exports.target import ExportFile
from pipeplan.from_options import build_problem as building
from pipeplan.from_options.build_problem import speedup_text
from pipeplan.plan.plan import Plan
from pipeplan.planning import baselines
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.grid_shapes import grid_shapes, grid_sizes
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp import dynamic_program, grids
from pipeplan.solvers.dp.budget import SearchEffort
from pipeplan.solvers.result import Status

PLAIN = Settings(simulate=False)
SENT = 3_000_000


def _spread(count: int, *, sent: int = 0) -> Profile:
    """A chain of layers that take longer and longer."""
    layers = [Layer(f"l{i}", 1e-3 * (1 + i), 2e-3 * (1 + i), 1_000_000, 1000) for i in range(count)]
    return chain(layers, sent, 8)


def _cluster(servers: int = 2, devices: int = 4, bandwidth: float = 1e9) -> Cluster:
    levels = (Level("server", devices, 4 * bandwidth), Level("cluster", servers, bandwidth))
    return Cluster("lab", Device("d", "cuda", 2**34), levels)


def test_the_integer_program_has_a_stage_on_every_place_of_a_grid() -> None:
    """Three stages would wait for fewer messages, and fit, but three of four workers are no grid."""
    sizes = (4_200_000, 4_200_000, 4_200_000, 8_400_000)
    layers = [Layer(f"l{n}", 0.01, 0.02, size, 0) for n, size in enumerate(sizes)]
    levels = (Level("server", 2, 12e9), Level("cluster", 2, 1.25e9, latency_s=5e-5))
    options = Options(schedule="1f1b-flush", accumulate=1, grid=True)
    profile = chain(layers, 65_536, 8, optimizer_state_ratio=5.0)
    problem = Problem(profile, Cluster("lab", Device("d", "cuda", 2**26), levels), options)
    exact, program = (solve(problem, replace(PLAIN, solver=solver)) for solver in ("dp", "ilp"))
    assert program.plan.config == exact.plan.config == "1-1-1-1"
    assert program.objective_s == pytest.approx(exact.objective_s, rel=1e-9)


def test_a_grid_takes_whole_servers_or_lies_inside_one_and_divides_the_minibatches() -> None:
    for servers, devices, allowed in ((1, 5, [1, 2, 3, 4, 5]), (4, 4, [1, 2, 3, 4, 8, 12, 16]), (3, 1, [1, 2, 3])):
        assert grid_sizes(_cluster(servers, devices)) == allowed
    level, device = Level("server", 3, 1e9), Device("d", "cuda", 2**34)
    mixed = [Server(device, replace(level, count=count)) for count in (3, 1, 2)]
    assert grid_sizes(Cluster.of_servers("mixed", mixed, [Level("cluster", 3, 1e9)])) == [1, 2, 3, 4, 6]
    asked = Options(grid=True, schedule="1f1b-flush", accumulate=6)
    assert {shape.replicas for shape in grid_shapes(Problem(_spread(6), _cluster(), asked))} == {1, 2, 3}
    assert 8 in {shape.replicas for shape in grid_shapes(Problem(_spread(6), _cluster(), Options(grid=True)))}
    with pytest.raises(InfeasibleError, match="relax --stages or --grid"):
        solve(Problem(_spread(6), _cluster(), Options(grid=True, stages=5, memory=False)))


@pytest.mark.parametrize("schedule", ["1f1b-stashing", "1f1b-flush"])
def test_many_cuts_change_nothing_and_a_time_that_is_over_leaves_a_bound(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not all pairs of cuts are gone through, the search by thresholds finds the same."""
    options = Options(grid=True, schedule=schedule, accumulate=8 if schedule == "1f1b-flush" else None)
    problem = Problem(_spread(7, sent=SENT), _cluster(), options)
    cuts = enumerate_cuts(problem, 10_000)
    quick, late = dynamic_program.solve(problem, cuts), dynamic_program.solve(problem, cuts, seconds=0.0)
    assert late.status in (Status.TIME_LIMIT, Status.FEASIBLE)
    assert late.bound_s <= quick.objective_s
    monkeypatch.setattr(grids, "MOST_CUTS", 0)
    assert dynamic_program.solve(problem, cuts).objective_s == pytest.approx(quick.objective_s, rel=1e-8)


def test_the_grid_beside_a_plan_is_what_asking_for_it_finds() -> None:
    for bandwidth in (1e8, 1e9, 1e10):
        problem = Problem(_spread(8, sent=SENT), _cluster(bandwidth=bandwidth))
        beside = baselines.uniform_grid(problem, enumerate_cuts(problem, 10_000))
        asked = solve(replace(problem, options=replace(problem.options, grid=True)), PLAIN)
        assert beside.plan is not None
        assert beside.step_time_s == pytest.approx(asked.objective_s, rel=1e-6)
        assert beside.config == f"{len(asked.plan.stages)}×{asked.plan.stages[0].replicas}"


@pytest.mark.parametrize("schedule", slow_but_for(["1f1b-flush"], ["1f1b-stashing", "1f1b-flush"]))
def test_the_grid_beside_a_plan_takes_so_much_effort_at_most(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(schedule=schedule, accumulate=8 if schedule == "1f1b-flush" else None, allow_copies=False)
    tight = replace(_cluster(2, 2), device=Device("d", "cuda", 30_000_000))
    problem = Problem(_spread(8, sent=SENT), tight, options)
    cuts, whole = enumerate_cuts(problem, 10_000), SearchEffort()
    grids = replace(problem, options=replace(options, grid=True))
    assert dynamic_program.solve(grids, cuts, effort=whole).plan is not None
    for share in (0.0, 0.3, 0.6, 0.9):
        less = SearchEffort(share * whole.spent)
        dynamic_program.solve(grids, cuts, effort=less)
        assert less.over
        assert less.spent < less.most + 5000, "it ends within a step"
    found = []
    for share in (0.5, 1.0):
        monkeypatch.setattr(baselines, "MOST_EFFORT", share * whole.spent)
        found.append(baselines.uniform_grid(problem, cuts))
    assert [one.plan is None for one in found] == [True, False]
    assert found[0].remark == "the search was cut short to save time; --grid completes it"
    again = SearchEffort(), SearchEffort()
    for effort in again:
        dynamic_program.solve(problem, cuts, effort=effort)
    assert again[0].spent == again[1].spent > 0, "the clock has no part in it"


def test_the_check_verifies_that_a_plan_is_a_grid() -> None:
    profile = _spread(8, sent=SENT)
    document = written(solve(Problem(profile, _cluster(), Options(grid=True, stages=2)), PLAIN))
    assert document["options"]["grid"] is True
    assert findings(document, profile)["constraints"].holds is True
    first, last = (document["plan"]["stages"][number]["workers"] for number in (0, -1))
    for workers in (([first[0]], last), (first, [worker + 1 for worker in last]), (last, first)):

        def move(one: dict[str, Any], workers: Any = workers) -> None:
            for number, mine in zip((0, -1), workers, strict=True):
                one["plan"]["stages"][number]["workers"] = mine

        found = findings(changed(document, move), profile)
        assert found.get("constraints", next(iter(found.values()))).holds is not True


# Solving for a trainer.


class _Told:
    """A trainer of uniform grids that drain, told by one file."""

    name, title, orders_devices = "told", "Told 1.0", False

    def restrict(self, profile: Profile, options: Options) -> Options:
        return replace(options, grid=True, schedule="1f1b-flush")

    def refuse(self, problem: Problem, plan: Plan) -> None:
        if 1 in (problem.options.stages, problem.options.max_stages):
            raise InputError("Told 1.0 has no use for one stage")

    def files(self, problem: Problem, plan: Plan) -> dict[str, ExportFile]:
        return {"plan.txt": ExportFile(plan.config, "the plan")}

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        return f"told {folder}"


@pytest.fixture
def told(run: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Solve for the trainer with some more options."""
    monkeypatch.setattr(building, "export_target", lambda name: _Told())
    _spread(6, sent=30_000_000).save(Path("profile.json"))
    Path("lab.toml").write_text(cluster_toml(_cluster(2, 2)), encoding="utf-8")

    def solve_for(options: str = "--batch 64") -> Ran:
        return run("solve", "--cluster", "lab.toml", "--for", "told", "--force", *options.split())

    return solve_for


def _written() -> Any:
    return json.loads(Path("plan/plan.json").read_text(encoding="utf-8"))


def test_solving_for_a_trainer_writes_its_files_and_says_the_cost(told: Any) -> None:
    done = told()
    assert done.code == 0
    plan = _written()
    assert (plan["options"]["grid"], plan["plan"]["schedule"]) == (True, "1f1b-flush")
    assert Path("plan/told/plan.txt").read_text(encoding="utf-8") == plan["plan"]["config"]
    assert "written: plan/told/plan.txt  the plan" in done.err
    assert done.err.strip().endswith("next: told plan/told")
    said = done.out.strip().splitlines()[-1]
    assert said.startswith("Restricted to what Told 1.0 can express. Without the restriction: ")
    free = solve(Problem(_spread(6, sent=30_000_000), _cluster(2, 2)), Settings(solver="dp"))
    gain = plan["stated"]["minibatch_s"] / free.predicted_s
    assert f"{free.plan.config} by 1f1b-stashing, {speedup_text(gain)}" in said
    # Two workers are no loss by the trainer.
    done = told("--batch 64 --max-workers 2")
    best = _written()["plan"]["config"]
    assert done.out.splitlines()[-1].endswith(f"{best} by 1f1b-flush, no faster; {best} by 1f1b-stashing, no faster.")
    shown = [speedup_text(gain) for gain in (0.9, 1.0, 1.003, 1.0051)]
    assert shown == ["no faster", "no faster", "less than 1% faster", "1.01x faster"]


def test_the_global_batch_is_what_was_asked_whatever_minibatch_is_chosen(told: Any) -> None:
    whole = _spread(6, sent=30_000_000)
    # Of 16 samples in as much time as of 8; of 48, which do not divide the batch, too.
    sizes = tuple(Size(size, whole.layers, whole.tensors) for size in (16, 48))
    replace(whole, sizes=sizes).save(Path("profile.json"))
    for asked, size, count in (("64", 16, 4), ("64 --microbatch 8", 8, 8), ("20", 4, 5)):
        done = told(f"--batch {asked}")
        assert done.code == 0, done.err
        plan = _written()
        assert (plan["profile"]["minibatch"], plan["options"]["accumulate"]) == (size, count)
    for arguments, complaint in (
        ("--batch 21 --microbatch 16", "a batch of 21 samples cannot be cut into microbatches of 16"),
        ("--batch 0", "--batch must be at least 1"),
        ("--staleness 1", "leave it out with --schedule, --inference and --for"),
    ):
        done = told(arguments)
        assert done.code == 2
        assert complaint in done.err


def test_what_a_trainer_cannot_express_or_write_leaves_the_older_plan(told: Any, run: Run) -> None:
    done = told("--batch 64 --stages 1-1")
    assert (done.code, Path("plan").exists()) == (2, False)
    assert done.err.splitlines()[-1] == "error: Told 1.0 has no use for one stage"
    asked = ("solve", "--cluster", "lab.toml", "--batch", "64", "--schedule", "1f1b-flush", "--max-workers")
    assert run(*asked, "2").code == 0
    before = Path("plan/plan.json").read_bytes()
    Path("plan/told").write_text("of someone", encoding="utf-8")
    done = told("--batch 64 --schedule 1f1b-flush --max-workers 3")
    assert (done.code, done.err) == (2, "error: plan/told is not a folder: give another one with -o\n")
    assert Path("plan/plan.json").read_bytes() == before


def test_what_is_of_an_older_plan_is_named(told: Any) -> None:
    assert "older plan" not in told().err
    for name in ("megatron", "trainjob.yaml"):
        Path("plan", name).write_text("", encoding="utf-8")
    (line,) = (line for line in told("--batch 64 --max-workers 2").err.splitlines() if "older plan" in line)
    assert line == "files of the older plan, to be written again: trainjob.yaml, megatron in plan"

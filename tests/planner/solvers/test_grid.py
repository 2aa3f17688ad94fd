"""Uniform grids against brute force, which tries them all, by both solvers; and what they are restricted to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Run
from extents import first_few, slow_but_for
from instances import ALL_SCHEDULES, Instance, crowded_instance, drawn, mixed_instance, unequal_instance
from solver_contract import check_solvers

from pipeplan.checker.verify import check_plan
from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost.stage_times import grid_shape_of
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.exports.target import ExportFile
from pipeplan.from_options import build_problem as building
from pipeplan.from_options.build_problem import speedup_text
from pipeplan.plan.plan import Plan
from pipeplan.planning import baselines
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.grid_shapes import grid_shapes, grid_sizes
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Size, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.plan_json import plan_document
from pipeplan.solvers.dp import dynamic_program, grids
from pipeplan.solvers.dp.budget import SearchEffort
from pipeplan.solvers.result import Status
from pipeplan.util.files import Node

Draw = Callable[..., Instance]
PLAIN = Settings(simulate=False)


def _check(instance: Instance, problem: Problem, *, cold: bool) -> None:
    """Both solvers find the best grid; the ILP by itself, or with the DP's step time as its bound."""
    for result in check_solvers(instance, problem, ilp=["cold" if cold else "bounded"]):
        if result.plan is not None:
            assert grid_shape_of(result.plan, problem.cluster) is not None


def _grid(seed: int, draw: Draw, schedule: str | None, layers: int = 5) -> tuple[Instance, Problem]:
    return drawn(seed, lambda number: replace(draw(number, layers=layers, schedule=schedule), grid=True))


@pytest.mark.parametrize("draw", [mixed_instance, unequal_instance], ids=["equal", "unequal"])
@pytest.mark.parametrize("schedule", [None, *ALL_SCHEDULES])
@pytest.mark.parametrize("seeds", first_few(range(3), 1))
def test_both_solvers_find_the_best_uniform_grid(schedule: str | None, draw: Draw, seeds: range) -> None:
    for seed in seeds:
        _check(*_grid(seed, draw, schedule), cold=seed % 2 == 0)


def test_the_integer_program_has_a_stage_on_every_place_of_a_grid() -> None:
    """Three stages would wait for fewer messages, and fit, but three of four workers are no grid."""
    sizes = (4_200_000, 4_200_000, 4_200_000, 8_400_000)
    layers = tuple(Layer(f"l{n}", 0.01, 0.02, size, 0) for n, size in enumerate(sizes))
    tensors = tuple(Tensor(f"t{n}", f"l{n}", (f"l{n + 1}",), 65_536, 65_536) for n in range(len(sizes) - 1))
    cluster = Cluster(
        "lab", Device("d", "cuda", 2**26), (Level("server", 2, 12e9), Level("cluster", 2, 1.25e9, latency_s=5e-5))
    )
    options = Options(schedule="1f1b-flush", accumulate=1, grid=True)
    problem = Problem(Profile(layers, tensors, 8, optimizer_state_ratio=5.0), cluster, options)
    exact, program = (solve(problem, replace(PLAIN, solver=solver)) for solver in ("dp", "ilp"))
    assert program.plan.config == exact.plan.config == "1-1-1-1"
    assert program.objective_s == pytest.approx(exact.objective_s, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(30_000, 30_200, 50))
@pytest.mark.parametrize("draw", [mixed_instance, unequal_instance], ids=["equal", "unequal"])
@pytest.mark.parametrize("schedule", [None, *ALL_SCHEDULES])
def test_both_solvers_find_the_best_uniform_grid_at_length(schedule: str | None, draw: Draw, start: int) -> None:
    for seed in range(start, start + 50):
        _check(*_grid(seed, draw, schedule, layers=6), cold=seed % 2 == 0)


def _spread(count: int, *, sent: int = 0) -> Profile:
    """A chain of layers that take longer and longer."""
    layers = tuple(Layer(f"l{i}", 1e-3 * (1 + i), 2e-3 * (1 + i), 1_000_000, 1000) for i in range(count))
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), sent, sent) for i in range(count - 1))
    return Profile(layers, tensors, minibatch=8)


def _cluster(servers: int, devices: int, bandwidth: float = 1e9) -> Cluster:
    levels = (Level("server", devices, 4 * bandwidth), Level("cluster", servers, bandwidth))
    return Cluster("lab", Device("d", "cuda", 2**34), levels)


@pytest.mark.parametrize(
    ("servers", "devices", "allowed"), [(1, 5, [1, 2, 3, 4, 5]), (4, 4, [1, 2, 3, 4, 8, 12, 16]), (3, 1, [1, 2, 3])]
)
def test_a_grid_takes_whole_servers_or_lies_inside_one(servers: int, devices: int, allowed: list[int]) -> None:
    assert grid_sizes(_cluster(servers, devices)) == allowed


def test_the_first_servers_count_where_servers_differ() -> None:
    level, device = Level("server", 3, 1e9), Device("d", "cuda", 2**34)
    servers = [Server(device, replace(level, count=count)) for count in (3, 1, 2)]
    assert grid_sizes(Cluster.of_servers("mixed", servers, [Level("cluster", 3, 1e9)])) == [1, 2, 3, 4, 6]


def test_replicas_share_the_minibatches_of_an_update_evenly() -> None:
    asked = Options(grid=True, schedule="1f1b-flush", accumulate=6)
    found = {shape.replicas for shape in grid_shapes(Problem(_spread(6), _cluster(2, 4), asked))}
    assert found == {1, 2, 3}
    assert 8 in {shape.replicas for shape in grid_shapes(Problem(_spread(6), _cluster(2, 4), Options(grid=True)))}


def test_a_grid_of_one_replica_is_straight() -> None:
    straight = Options(grid=True, max_replicas=1, allow_copies=False)
    outcome = solve(Problem(_spread(6), _cluster(2, 4), straight), PLAIN)
    assert {stage.replicas for stage in outcome.plan.stages} == {1}
    assert outcome.verdict.proven


def test_stages_that_make_no_grid_are_refused_in_one_line() -> None:
    with pytest.raises(InfeasibleError, match="relax --stages or --grid"):
        solve(Problem(_spread(6), _cluster(2, 4), Options(grid=True, stages=5, memory=False)))


def test_a_time_that_is_over_leaves_a_bound() -> None:
    problem = Problem(_spread(8), _cluster(2, 4), Options(grid=True))
    cuts = enumerate_cuts(problem, 10_000)
    late, best = dynamic_program.solve(problem, cuts, seconds=0.0), dynamic_program.solve(problem, cuts)
    assert late.status in (Status.TIME_LIMIT, Status.FEASIBLE)
    assert late.bound_s <= best.objective_s


@pytest.mark.parametrize("schedule", ["1f1b-stashing", "1f1b-flush"])
def test_many_cuts_change_nothing(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all pairs of cuts are gone through, the search by thresholds finds the same."""
    accumulate = 8 if schedule == "1f1b-flush" else None
    options = Options(grid=True, schedule=schedule, accumulate=accumulate)
    problem = Problem(_spread(7, sent=3_000_000), _cluster(2, 4), options)
    cuts = enumerate_cuts(problem, 10_000)
    quick = dynamic_program.solve(problem, cuts)
    monkeypatch.setattr(grids, "MOST_CUTS", 0)
    assert dynamic_program.solve(problem, cuts).objective_s == pytest.approx(quick.objective_s, rel=1e-8)


def test_shared_cards_leave_a_grid_a_grid() -> None:
    """The local search finds no worse than the best of each shape, and nothing else than grids."""
    bound = 0
    for seed in (6, 10, 16, 17):
        _, problem = _grid(seed, crowded_instance, None)
        outcome = _outcome(problem)
        if outcome is None:
            continue
        assert grid_shape_of(outcome.plan, problem.cluster) is not None
        assert outcome.evaluation.step_time_s >= outcome.bound_s * (1 - 1e-6)
        bound += outcome.evaluation.step_time_s > outcome.evaluation.alone_s * (1 + 1e-6)
    assert bound


def _outcome(problem: Problem) -> Outcome | None:
    try:
        return solve(problem, Settings(solver="dp", simulate=False))
    except InfeasibleError:
        return None


def test_the_grid_beside_a_plan_is_what_asking_for_it_finds() -> None:
    for bandwidth in (1e8, 1e9, 1e10):
        problem = Problem(_spread(8, sent=3_000_000), _cluster(2, 4, bandwidth))
        beside = baselines.uniform_grid(problem, enumerate_cuts(problem, 10_000))
        asked = solve(replace(problem, options=replace(problem.options, grid=True)), PLAIN)
        assert beside.plan is not None
        assert beside.step_time_s == pytest.approx(asked.objective_s, rel=1e-6)
        assert beside.config == shape_text(asked.plan)


@pytest.mark.parametrize("schedule", slow_but_for(["1f1b-flush"], ["1f1b-stashing", "1f1b-flush"]))
def test_the_grid_beside_a_plan_takes_so_much_effort_at_most(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(schedule=schedule, accumulate=8 if schedule == "1f1b-flush" else None, allow_copies=False)
    tight = _cluster(2, 2)
    tight = replace(tight, device=replace(tight.device, memory_bytes=30_000_000))
    problem = Problem(_spread(8, sent=3_000_000), tight, options)
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


def test_a_grid_among_many_cuts_is_among_a_selection_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(_spread(60, sent=3_000_000), _cluster(2, 4))
    cuts = enumerate_cuts(problem, 10_000)
    among_all = baselines.uniform_grid(problem, cuts)
    monkeypatch.setattr(baselines, "MOST_CELLS", 100)
    selected = baselines.uniform_grid(problem, cuts)
    assert (among_all.remark, selected.remark) == ("", baselines.ON_SELECTION)
    assert among_all.step_time_s is not None
    assert selected.step_time_s is not None
    assert among_all.step_time_s <= selected.step_time_s <= among_all.step_time_s * 1.2


def shape_text(plan: Plan) -> str:
    return f"{len(plan.stages)}×{plan.stages[0].replicas}"


def test_the_check_verifies_that_a_plan_is_a_grid() -> None:
    profile = _spread(8, sent=3_000_000)
    document = plan_document(solve(Problem(profile, _cluster(2, 4), Options(grid=True, stages=2)), PLAIN))
    assert document["options"]["grid"] is True
    assert _constraints(document, profile) is True
    stages = document["plan"]["stages"]
    first, last = stages[0]["workers"], stages[-1]["workers"]
    for changed in (
        ([first[0]], last),
        (first, [worker + 1 for worker in last]),
        (last, first),
    ):
        stages[0]["workers"], stages[-1]["workers"] = changed
        assert _constraints(document, profile) is not True
    stages[0]["workers"], stages[-1]["workers"] = first, last
    assert _constraints(document, profile) is True


def _constraints(document: dict[str, Any], profile: Profile) -> bool | None:
    found = check_plan(Node(json.loads(json.dumps(document)), "plan.json"), profile).results
    return next((one.holds for one in found if one.what == "constraints"), found[0].holds)


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
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "export_target", lambda name: _Told())
    monkeypatch.chdir(tmp_path)
    _spread(6, sent=30_000_000).save(Path("profile.json"))
    Path("lab.toml").write_text(LAB, encoding="utf-8")


LAB = """format = "pipeplan-cluster"
version = 1
name = "lab"
device = {name = "d", kind = "cuda", memory = "16 GiB"}
level = [
    {name = "server", count = 2, bandwidth = "8 GB/s"},
    {name = "cluster", count = 2, bandwidth = "1 GB/s"},
]
"""


@pytest.mark.usefixtures("told")
def test_solving_for_a_trainer_writes_its_files_and_says_the_cost(run: Run) -> None:
    done = run("solve", "--cluster", "lab.toml", "--for", "told", "--batch", "64")
    assert done.code == 0
    plan = json.loads(Path("plan/plan.json").read_text(encoding="utf-8"))
    assert (plan["options"]["grid"], plan["plan"]["schedule"]) == (True, "1f1b-flush")
    assert Path("plan/told/plan.txt").read_text(encoding="utf-8") == plan["plan"]["config"]
    assert "written: plan/told/plan.txt  the plan" in done.err
    assert done.err.strip().endswith("next: told plan/told")
    said = done.out.strip().splitlines()[-1]
    assert said.startswith("Restricted to what Told 1.0 can express. Without the restriction: ")
    free = solve(Problem(_spread(6, sent=30_000_000), cluster_toml.load_cluster("lab.toml")), Settings(solver="dp"))
    gain = plan["stated"]["minibatch_s"] / free.predicted_s
    faster = f"{gain:.2f}x faster" if gain > 1.005 else "no faster"
    assert f"{free.plan.config} by 1f1b-stashing, {faster}" in said


@pytest.mark.usefixtures("told")
def test_the_global_batch_is_what_was_asked_whatever_minibatch_is_chosen(run: Run) -> None:
    whole = _spread(6, sent=30_000_000)
    # Of 16 samples in as much time as of 8; of 48, which do not divide the batch, too.
    sizes = tuple(Size(size, whole.layers, whole.tensors) for size in (16, 48))
    replace(whole, sizes=sizes).save(Path("profile.json"))
    asked = ("solve", "--cluster", "lab.toml", "--for", "told", "--force", "--batch")
    for batch, named, size, count in (("64", (), 16, 4), ("64", ("8",), 8, 8), ("20", (), 4, 5)):
        done = run(*asked, batch, *(("--microbatch", *named) if named else ()))
        assert done.code == 0, done.err
        plan = json.loads(Path("plan/plan.json").read_text(encoding="utf-8"))
        assert (plan["profile"]["minibatch"], plan["options"]["accumulate"]) == (size, count)
    assert "a batch of 21 samples cannot be cut into microbatches of 16" in run(*asked, "21", "--microbatch", "16").err


@pytest.mark.usefixtures("told")
def test_fewer_workers_than_could_be_are_no_loss_by_the_trainer(run: Run) -> None:
    done = run("solve", "--cluster", "lab.toml", "--for", "told", "--batch", "64", "--max-workers", "2")
    best = json.loads(Path("plan/plan.json").read_text(encoding="utf-8"))["plan"]["config"]
    assert done.out.splitlines()[-1].endswith(f"{best} by 1f1b-flush, no faster; {best} by 1f1b-stashing, no faster.")


def test_a_gain_that_rounds_to_nothing_is_no_factor() -> None:
    said = [speedup_text(gain) for gain in (0.9, 1.0, 1.003, 1.0051)]
    assert said == ["no faster", "no faster", "less than 1% faster", "1.01x faster"]


@pytest.mark.usefixtures("told")
def test_what_a_trainer_cannot_express_is_not_written(run: Run) -> None:
    done = run("solve", "--cluster", "lab.toml", "--for", "told", "--batch", "64", "--stages", "1-1")
    assert (done.code, Path("plan").exists()) == (2, False)
    assert done.err.splitlines()[-1] == "error: Told 1.0 has no use for one stage"


@pytest.mark.usefixtures("told")
def test_a_trainers_files_that_cannot_be_written_leave_the_older_plan(run: Run) -> None:
    asked = ("solve", "--cluster", "lab.toml", "--batch", "64", "--schedule", "1f1b-flush", "--max-workers")
    assert run(*asked, "2").code == 0
    before = Path("plan/plan.json").read_bytes()
    Path("plan/told").write_text("of someone", encoding="utf-8")
    done = run(*asked, "3", "--for", "told", "--force")
    assert (done.code, done.err) == (
        2,
        "error: plan/told is not a folder: give another one with -o\n",
    )
    assert Path("plan/plan.json").read_bytes() == before


@pytest.mark.usefixtures("told")
def test_what_is_of_an_older_plan_is_named(run: Run) -> None:
    asked = ("solve", "--cluster", "lab.toml", "--batch", "64", "--for", "told", "--force")
    assert "older plan" not in run(*asked).err
    for name in ("megatron", "trainjob.yaml"):
        Path("plan", name).write_text("", encoding="utf-8")
    (line,) = (line for line in run(*asked, "--max-workers", "2").err.splitlines() if "older plan" in line)
    assert line == "files of the older plan, to be written again: trainjob.yaml, megatron in plan"


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--batch", "20", "--microbatch", "8"], "a batch of 20 samples cannot be cut into microbatches of 8: "),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--staleness", "1"], "leave it out with --schedule, --inference and --for"),
    ],
)
def test_what_does_not_go_with_a_trainer_is_said(run: Run, arguments: list[str], complaint: str) -> None:
    done = run("solve", "--cluster", "lab.toml", "--for", "told", *arguments)
    assert done.code == 2
    assert complaint in done.err

"""Data parallelism as an answer: plans of one stage that wait for their update, FSDP and HSDP, and forged figures."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from checking import changed, fault, findings, written
from long_chains import chain

import pipeplan
from pipeplan.checker import data_parallel as checker
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost import ddp_overlap
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE, evaluate
from pipeplan.drawing.answer import MOST_LINES, answer_lines
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.exports.target import export_files, export_target
from pipeplan.planning.candidate_search import FSDP, HSDP
from pipeplan.planning.figure import TOLERANCE
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.plan_file import plan_from_document
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.rendering import plan_json
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.simulate import simulate
from pipeplan.util.files import Node
from pipeplan_launch.comm import buckets

MB, GB = 10**6, 10**9
BLOCKS = 6
QUICK = Settings("dp", certify=False, compare=False, time_limit_s=None)
PLAIN = replace(QUICK, simulate=False)
SERVERS = Cluster(
    "nvlink",
    Device("gpu", "cuda", 12 * GB),
    (Level("server", 4, 100.0 * GB, 1e-5), Level("cluster", 2, 12.0 * GB, 2e-5)),
)


def _profile(weights: int, prefix: str = "h.", **more: Any) -> Profile:
    """An embedding, equal blocks and a head, with Adam and large activations between the blocks."""
    sizes = {"embed": 100 * MB, **{f"{prefix}{block}": weights for block in range(BLOCKS)}, "head": 100 * MB}
    layers = [
        Layer(name, 0.1 * (size / weights), 0.2 * (size / weights), size, 200 * MB, name, "Block", update_s=0.001)
        for name, size in sizes.items()
    ]
    return chain(layers, 50 * MB, 4, optimizer_state_ratio=2.0, model_name="chain", **more)


LARGE, TINY = _profile(700 * MB), _profile(10 * MB)
ONE_STAGE = Options(schedule="1f1b-flush", accumulate=8, stages=1, sharding=Sharding.FULL)


@cache
def _answer() -> Outcome:
    return pipeplan.solve(LARGE, SERVERS, settings=QUICK, batch=64)


@cache
def _with_several_microbatches() -> Outcome:
    """The plan of the answer with four microbatches of an update on every worker."""
    problem = _answer().problem
    return solve(replace(problem, options=replace(problem.options, accumulate=32)), QUICK)


def test_a_model_too_large_for_ddp_gets_fsdp_or_hsdp() -> None:
    outcome = _answer()
    choice = outcome.choice
    assert choice.taken.kind in (FSDP, HSDP)
    assert choice.rival("DDP") is None
    assert outcome.plan.busy == SERVERS.workers
    assert outcome.predicted_s == outcome.objective_s, "the figure is the recurrence"
    fastest = min(one.sample_s for one in choice.rivals)
    assert choice.taken.sample_s <= fastest * (1 + TOLERANCE)
    assert choice.proven.sample_s <= fastest
    assert outcome.bound_s == pytest.approx(choice.proven.sample_s * outcome.problem.profile.minibatch)
    assert outcome.bound_s <= outcome.predicted_s
    lines = answer_lines(outcome, 80, "next")
    assert len(lines) <= MOST_LINES
    assert f"{choice.taken.kind} on 8 workers" in lines[2]
    assert any("DDP does not fit" in line for line in lines)
    assert "proven: no plan" not in " ".join(lines), "one solver shows the bound"


def test_the_timeline_takes_as_long_as_the_recurrence() -> None:
    outcome = _with_several_microbatches()
    scenario = scenario_of_plan(outcome.plan, outcome.problem, outcome.evaluation)
    steady = simulate(scenario, 20 * (outcome.plan.accumulate or 1)).report.steady
    assert steady.step_time_s == pytest.approx(outcome.predicted_s, rel=1e-9)


def test_stage_files_and_plan_json_name_the_engine() -> None:
    """Of all plans of one stage that train synchronously on several workers, and of no other."""
    found, options = {}, replace(ONE_STAGE, accumulate=16)
    for sharding in Sharding:
        outcome = solve(Problem(TINY, SERVERS, replace(options, sharding=sharding)), PLAIN)
        (stage,) = plan_json.stage_documents(outcome)
        found[sharding] = stage["data_parallel"]
        assert plan_json.plan_document(outcome)["data_parallel"] == stage["data_parallel"]
        assert stage.get("shard_optimizer", False) is (sharding == Sharding.OPTIMIZER)
    assert list(found.values()) == ["ddp", "zero1", "fsdp", "hsdp"]
    for changes in ({"stages": 2}, {"max_workers": 1}, {"schedule": "1f1b-stashing", "accumulate": None}):
        outcome = solve(Problem(TINY, SERVERS, replace(options, sharding=Sharding.NONE, **changes)), PLAIN)
        assert {stage["data_parallel"] for stage in plan_json.stage_documents(outcome)} == {""}


def _work_s(document: dict[str, Any]) -> float:
    seconds: float = document["prediction"]["batch"]["work_s"]
    return seconds


FORGERIES: tuple[tuple[str, Callable[[dict[str, Any]], object]], ...] = (
    ("formulas", lambda one: one["prediction"]["batch"].update(work_s=0.9 * _work_s(one))),
    ("formulas", lambda one: one["prediction"]["batch"].update(exposed_s=0.0)),
    ("stages", lambda one: one["prediction"]["stages"][0].update(sync_s=1e-3)),
    ("memory", lambda one: one["prediction"]["stages"][0].update(memory_bytes=GB)),
    ("description", lambda one: one.update(data_parallel="ddp")),
    ("formulas", lambda one: one["options"].update(sharding="none")),
    ("document", lambda one: one["options"].update(sharding="zero3")),
    ("document", lambda one: one["plan"]["stages"][0]["workers"].pop()),
    ("optimality", lambda one: one.update(certificate={})),
    ("verdict", lambda one: one.update(bound_s=2 * one["bound_s"])),
)


def test_an_honest_plan_passes_the_check_and_forged_figures_do_not() -> None:
    for outcome in (_answer(), _with_several_microbatches()):
        assert fault(written(outcome), LARGE) == ""
        assert findings(written(outcome), LARGE)["memory"].holds
    for number, (what, forge) in enumerate(FORGERIES):
        assert fault(changed(written(_answer()), forge), LARGE).startswith(f"{what}: "), number


@pytest.mark.parametrize("sharding", [Sharding.FULL, Sharding.HYBRID])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_checker_has_the_same_figures(sharding: Sharding, recompute: bool) -> None:
    """For blocks with a root, also with tied weights, and for runs of layers; one and several microbatches a worker.

    Cores that workers share also move the weights that passes wait for.
    """
    unnamed = _profile(700 * MB, "h")
    unnamed = replace(unnamed, layers=tuple(replace(layer, module="") for layer in unnamed.layers))
    tied = replace(LARGE, tied=(TiedWeights(("weight",), ("embed", "head"), 80 * MB),))
    cases = itertools.product((1.0, 0.3), (0, 2), (LARGE, unnamed, tied), (8, 16))
    for overlap, cores, profile, accumulate in cases:
        cluster = replace(SERVERS, device=replace(SERVERS.device, cores=cores))
        changes = {"accumulate": accumulate, "sharding": sharding, "overlap": overlap, "memory": False}
        outcome = solve(Problem(profile, cluster, replace(ONE_STAGE, **changes)), QUICK)
        if recompute:
            plan = replace(outcome.plan, stages=(replace(outcome.plan.stages[0], recompute=True),))
            score = evaluate(plan, outcome.problem)
            figure = replace(outcome.figure, formula_s=score.step_time_s)
            outcome = replace(outcome, plan=plan, evaluation=score, figure=figure)
        assert fault(written(outcome), profile) == "", (overlap, cores, accumulate)


def test_recomputation_only_where_memory_requires_it() -> None:
    plenty = solve(Problem(LARGE, SERVERS, ONE_STAGE), QUICK)
    assert not plenty.plan.stages[0].recompute
    memory = round(plenty.evaluation.stages[0].memory_bytes) - 300 * MB
    short = replace(SERVERS, device=replace(SERVERS.device, memory_bytes=memory))
    assert solve(Problem(LARGE, short, ONE_STAGE), QUICK).plan.stages[0].recompute
    with pytest.raises(InfeasibleError, match=r"fsdp on 8 workers: stage 1 needs .* more than the device has"):
        solve(Problem(LARGE, short, replace(ONE_STAGE, recompute=False)), QUICK)


def test_every_worker_has_equally_many_microbatches() -> None:
    options = replace(ONE_STAGE, accumulate=12, memory=False)
    assert solve(Problem(LARGE, SERVERS, options), QUICK).plan.busy == 6
    hybrid = replace(options, sharding=Sharding.HYBRID)
    assert solve(Problem(LARGE, SERVERS, hybrid), QUICK).plan.busy == 4, "6 workers are not whole servers"
    with pytest.raises(InfeasibleError, match="hsdp: no two or more workers of equally large servers have equally"):
        solve(Problem(LARGE, SERVERS, replace(hybrid, accumulate=5)), QUICK)
    with pytest.raises(InputError, match="fsdp is for plans of one stage under 1f1b-flush"):
        replace(options, stages=None)


def test_an_older_plan_with_a_divided_optimiser_is_read() -> None:
    options = Options(schedule="1f1b-flush", accumulate=8, sharding=Sharding.OPTIMIZER)
    document = written(solve(Problem(TINY, SERVERS, options), PLAIN))
    del document["options"]["sharding"], document["data_parallel"]
    document["options"]["shard_optimizer"] = True
    assert plan_from_document(Node(document, "plan.json"), TINY)[0].options.sharding == Sharding.OPTIMIZER
    assert fault(document, TINY) == ""


def test_exports_divide_the_weights_or_refuse() -> None:
    outcome = _answer()
    problem, plan = outcome.problem, outcome.plan
    for name in ("deepspeed", "torch-pipelining"):
        with pytest.raises(InputError, match="its replicas divide the weights, which this export does not write"):
            export_files(export_target(name), problem, plan)
    hybrid = replace(problem, options=replace(problem.options, sharding=Sharding.HYBRID))
    own = (1, 8) if outcome.choice.taken.kind == FSDP else (2, 4)
    for given, (replicate, shard) in ((problem, own), (hybrid, (2, 4))):
        (text,) = (file.text for file in export_files(export_target("torchtitan"), given, plan).values())
        assert f"data_parallel_replicate_degree={replicate}," in text
        assert f"data_parallel_shard_degree={shard}," in text


def test_zero_1_is_left_out_where_the_optimiser_needs_whole_parameters() -> None:
    muon = replace(TINY, optimizer_name="MuonWithAdamW", optimizer_elementwise=False)
    for profile, expected in ((TINY, True), (muon, False)):
        choice = pipeplan.solve(profile, SERVERS, settings=QUICK, batch=64).choice
        assert (choice.rival("ZeRO-1") is not None) is expected
    with pytest.raises(InputError, match="--shard-optimizer cuts parameters into parts, but the optimiser Muon"):
        Problem(muon, SERVERS, Options(sharding=Sharding.OPTIMIZER))


# One stage that waits for its update.

MIB = 2**20


def _problem(seed: int, overlap: float = 1.0) -> Problem:
    """A chain whose gradients take about as long as its computing; nothing else is slow."""
    rng = random.Random(seed)
    layers = [Layer(f"l{n}", rng.random(), 2 * rng.random(), rng.randint(1, 60) * MIB, 0) for n in range(4)]
    levels = (Level("server", 4, rng.choice([40.0, 80.0, 160.0]) * MIB),)
    return Problem(chain(layers, 1000), Cluster("t", Device("d", "cuda", 2**40), levels), Options(overlap=overlap))


def test_the_proof_of_one_stage_is_checked() -> None:
    """Where it is the best: also that no other number of workers does better, and that no state is left out."""
    outcomes = (solve(_problem(seed), Settings("dp", simulate=False)) for seed in range(12))
    outcome = next(one for one in outcomes if one.evaluation.bound == WAITS_FOR_UPDATE)
    document, profile = written(outcome), outcome.problem.profile
    assert findings(document, profile)["optimality"].holds
    bound_s = document["certificate"]["bound_s"] * 1.1
    greedy = changed(document, lambda d: d["certificate"].update(bound_s=bound_s))
    assert not findings(greedy, profile)["optimality"].holds
    exposed_s = document["prediction"]["stages"][0]["exposed_sync_s"] * 1.01
    wrong = changed(document, lambda d: d["prediction"]["stages"][0].update(exposed_sync_s=exposed_s))
    assert not findings(wrong, profile)["stages"].holds


def test_buckets_close_where_those_of_the_executor_do() -> None:
    planned = ddp_overlap.FIRST_BUCKET_BYTES, ddp_overlap.BUCKET_BYTES
    checked = checker.FIRST_BUCKET_BYTES, checker.BUCKET_BYTES
    assert planned == checked == (buckets.FIRST_BUCKET_BYTES, buckets.BUCKET_BYTES)


def test_copies_of_one_stage_count_where_replicas_are_limited() -> None:
    """Two replicas at most in a copy: four workers can still be used, as two copies of two."""
    layers = [Layer(f"l{index}", 1.0, 2.0, 60 * MIB, 0) for index in range(2)]
    levels = (Level("server", 2, 400.0 * MIB), Level("cluster", 2, 200.0 * MIB))
    cluster = Cluster("t", Device("d", "cuda", 2**50), levels)
    problem = Problem(chain(layers, 10**10), cluster, Options(max_replicas=2))
    outcome = solve(problem, Settings("dp", simulate=False))
    assert (outcome.plan.config, len(outcome.plan.stages)) == ("2×(2)", 1)
    assert outcome.evaluation.bound == WAITS_FOR_UPDATE
    assert outcome.bound_s <= outcome.objective_s * (1 + 1e-9)
    assert findings(written(outcome), problem.profile)["optimality"].holds

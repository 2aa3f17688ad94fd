"""FSDP and HSDP as answers: a model that is too large for DDP, its plan folder, and forged figures."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import pipeplan
from pipeplan.checker.verify import CheckedPlan, check_readable_plan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.drawing.answer import MOST_LINES, answer_lines
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.exports.target import export_files, export_target
from pipeplan.plan.plan import Plan
from pipeplan.planning.candidate_search import FSDP, HSDP
from pipeplan.planning.figure import TOLERANCE
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.plan_file import plan_from_document
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.rendering import plan_json
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.simulate import simulate
from pipeplan.util.files import Node

MB, GB = 10**6, 10**9
BLOCKS = 6
QUICK = Settings("dp", certify=False, compare=False, time_limit_s=None)
SERVERS = Cluster(
    "nvlink",
    Device("gpu", "cuda", 12 * GB),
    (Level("server", 4, 100.0 * GB, 1e-5), Level("cluster", 2, 12.0 * GB, 2e-5)),
)


def _profile(weights: int) -> Profile:
    """An embedding, equal blocks and a head, with Adam and large activations between the blocks."""
    sizes = {"embed": 100 * MB, **{f"h.{block}": weights for block in range(BLOCKS)}, "head": 100 * MB}
    layers = tuple(
        Layer(name, 0.1 * (size / weights), 0.2 * (size / weights), size, 200 * MB, name, "Block", update_s=0.001)
        for name, size in sizes.items()
    )
    tensors = tuple(Tensor(f"t{a}", a, (b,), 50 * MB, 50 * MB) for a, b in itertools.pairwise(sizes))
    return Profile(layers, tensors, 4, optimizer_state_ratio=2.0, model_name="chain")


LARGE = _profile(700 * MB)


@cache
def _answer() -> Outcome:
    return pipeplan.solve(LARGE, SERVERS, settings=QUICK, batch=64)


def _with_several_microbatches() -> Outcome:
    """The plan of the answer with four microbatches of an update on every worker."""
    problem = _answer().problem
    return solve(replace(problem, options=replace(problem.options, accumulate=32)), QUICK)


def _document(outcome: Outcome) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(plan_json.plan_document(outcome)))
    return document


def _checked(document: dict[str, Any]) -> CheckedPlan:
    return check_readable_plan(Node(document, "plan.json"), LARGE)


def test_a_model_too_large_for_ddp_gets_fsdp_or_hsdp() -> None:
    outcome = _answer()
    choice = outcome.choice
    assert choice is not None
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
    assert steady is not None
    assert steady.step_time_s == pytest.approx(outcome.predicted_s, rel=1e-9)


def test_stage_files_and_plan_json_name_the_engine() -> None:
    """Of all plans of one stage that train synchronously on several workers, and of no other."""
    found = {}
    small, options = _profile(10 * MB), Options(schedule="1f1b-flush", accumulate=16, stages=1)
    for sharding in Sharding:
        problem = pipeplan.Problem(small, SERVERS, replace(options, sharding=sharding))
        outcome = solve(problem, replace(QUICK, simulate=False))
        (stage,) = plan_json.stage_documents(outcome)
        found[sharding] = stage["data_parallel"]
        assert plan_json.plan_document(outcome)["data_parallel"] == stage["data_parallel"]
        assert stage.get("shard_optimizer", False) is (sharding == Sharding.OPTIMIZER)
    assert list(found.values()) == ["ddp", "zero1", "fsdp", "hsdp"]
    for changes in ({"stages": 2}, {"max_workers": 1}, {"schedule": "1f1b-stashing", "accumulate": None}):
        problem = pipeplan.Problem(small, SERVERS, replace(options, **changes))
        outcome = solve(problem, replace(QUICK, simulate=False))
        assert {stage["data_parallel"] for stage in plan_json.stage_documents(outcome)} == {""}


def _unnamed(profile: Profile) -> Profile:
    """The profile without paths of modules, of which runs of layers are made."""
    layers = [replace(layer, name=layer.name.replace(".", ""), module="") for layer in profile.layers]
    tensors = [
        replace(one, producer=one.producer.replace(".", ""), consumers=(one.consumers[0].replace(".", ""),))
        for one in profile.tensors
    ]
    return replace(profile, layers=tuple(layers), tensors=tuple(tensors))


FORGERIES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a faster pass": ("formulas", lambda one: one["prediction"]["batch"].update(work_s=0.9 * _work_s(one))),
    "less waiting": ("formulas", lambda one: one["prediction"]["batch"].update(exposed_s=0.0)),
    "less to reduce": ("stages", lambda one: one["prediction"]["stages"][0].update(sync_s=1e-3)),
    "less memory": ("memory", lambda one: one["prediction"]["stages"][0].update(memory_bytes=GB)),
    "another engine": ("description", lambda one: one.update(data_parallel="ddp")),
    "whole weights": ("formulas", lambda one: one["options"].update(sharding="none")),
    "no such engine": ("document", lambda one: one["options"].update(sharding="zero3")),
    "fewer workers": ("document", lambda one: one["plan"]["stages"][0]["workers"].pop()),
    "a certificate": ("optimality", lambda one: one.update(certificate={})),
    "a higher bound": ("verdict", lambda one: one.update(bound_s=2 * one["bound_s"])),
}


def _work_s(document: dict[str, Any]) -> float:
    seconds: float = document["prediction"]["batch"]["work_s"]
    return seconds


def test_an_honest_plan_passes_the_check() -> None:
    for outcome in (_answer(), _with_several_microbatches()):
        checked = _checked(_document(outcome))
        assert checked.wrong is None, checked.wrong
        assert checked.holds("memory")


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_figures_are_refused(name: str) -> None:
    what, forge = FORGERIES[name]
    document = copy.deepcopy(_document(_answer()))
    forge(document)
    wrong = _checked(document).wrong
    assert wrong is not None
    assert wrong.what == what


@pytest.mark.parametrize("sharding", [Sharding.FULL, Sharding.HYBRID])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("overlap", [1.0, 0.3])
@pytest.mark.parametrize("cores", [0, 2])
def test_the_checker_has_the_same_figures(sharding: Sharding, recompute: bool, overlap: float, cores: int) -> None:
    """For blocks with a root, also with tied weights, and for runs of layers; one and several microbatches a worker.

    Cores that workers share also move the weights that passes wait for.
    """
    cluster = replace(SERVERS, device=replace(SERVERS.device, cores=cores))
    ties = (TiedWeights(("weight",), ("embed", "head"), 80 * MB),)
    for profile, accumulate in itertools.product((LARGE, _unnamed(LARGE), replace(LARGE, tied=ties)), (8, 16)):
        options = Options(
            schedule="1f1b-flush", accumulate=accumulate, stages=1, sharding=sharding, overlap=overlap, memory=False
        )
        outcome = solve(pipeplan.Problem(profile, cluster, options), QUICK)
        if recompute:
            plan = replace(outcome.plan, stages=(replace(outcome.plan.stages[0], recompute=True),))
            score = evaluate(plan, outcome.problem)
            figure = replace(outcome.figure, formula_s=score.step_time_s)
            outcome = replace(outcome, plan=plan, evaluation=score, figure=figure)
        checked = check_readable_plan(Node(_document(outcome), "plan.json"), profile)
        assert checked.wrong is None, checked.wrong


def test_recomputation_only_where_memory_requires_it() -> None:
    options = Options(schedule="1f1b-flush", accumulate=8, stages=1, sharding=Sharding.FULL)
    plenty = solve(pipeplan.Problem(LARGE, SERVERS, options), QUICK)
    assert not plenty.plan.stages[0].recompute
    short = replace(
        SERVERS, device=replace(SERVERS.device, memory_bytes=round(plenty.evaluation.stages[0].memory_bytes) - 300 * MB)
    )
    assert solve(pipeplan.Problem(LARGE, short, options), QUICK).plan.stages[0].recompute
    with pytest.raises(InfeasibleError, match=r"fsdp on 8 workers: stage 1 needs .* more than the device has"):
        solve(pipeplan.Problem(LARGE, short, replace(options, recompute=False)), QUICK)


def test_every_worker_has_equally_many_microbatches() -> None:
    options = Options(schedule="1f1b-flush", accumulate=12, stages=1, sharding=Sharding.FULL, memory=False)
    assert solve(pipeplan.Problem(LARGE, SERVERS, options), QUICK).plan.busy == 6
    hybrid = replace(options, sharding=Sharding.HYBRID)
    assert solve(pipeplan.Problem(LARGE, SERVERS, hybrid), QUICK).plan.busy == 4, "6 workers are not whole servers"
    with pytest.raises(
        InfeasibleError, match="hsdp: no two or more workers of equally large servers have equally many"
    ):
        solve(pipeplan.Problem(LARGE, SERVERS, replace(hybrid, accumulate=5)), QUICK)
    with pytest.raises(InputError, match="fsdp is for plans of one stage under 1f1b-flush"):
        replace(options, stages=None)


def test_an_older_plan_with_a_divided_optimiser_is_read() -> None:
    problem = pipeplan.Problem(
        _profile(10 * MB), SERVERS, Options(schedule="1f1b-flush", accumulate=8, sharding=Sharding.OPTIMIZER)
    )
    document = _document(solve(problem, replace(QUICK, simulate=False)))
    del document["options"]["sharding"], document["data_parallel"]
    document["options"]["shard_optimizer"] = True
    assert plan_from_document(Node(document, "plan.json"), problem.profile)[0].options.sharding == Sharding.OPTIMIZER
    assert check_readable_plan(Node(document, "plan.json"), problem.profile).wrong is None


def test_exports_divide_the_weights_or_refuse() -> None:
    outcome = _answer()
    problem, plan = outcome.problem, outcome.plan
    for name in ("deepspeed", "torch-pipelining"):
        with pytest.raises(InputError, match="its replicas divide the weights, which this export does not write"):
            export_files(export_target(name), problem, plan)
    stack = export_target("torchtitan")
    hybrid: tuple[Any, Plan] = (replace(problem, options=replace(problem.options, sharding=Sharding.HYBRID)), plan)
    for given, degrees in (
        ((problem, plan), (1, 8) if outcome.choice.taken.kind == FSDP else (2, 4)),
        (hybrid, (2, 4)),
    ):  # type: ignore[union-attr]
        (text,) = (file.text for file in export_files(stack, *given).values())
        assert f"data_parallel_replicate_degree={degrees[0]}," in text
        assert f"data_parallel_shard_degree={degrees[1]}," in text


def test_zero_1_is_left_out_where_the_optimiser_needs_whole_parameters() -> None:
    profile = replace(_profile(10 * MB), optimizer_name="MuonWithAdamW", optimizer_elementwise=False)
    for known, expected in ((_profile(10 * MB), True), (profile, False)):
        choice = pipeplan.solve(known, SERVERS, settings=QUICK, batch=64).choice
        assert choice is not None
        assert (choice.rival("ZeRO-1") is not None) is expected
    with pytest.raises(InputError, match="--shard-optimizer cuts parameters into parts, but the optimiser Muon"):
        Problem(profile, SERVERS, Options(sharding=Sharding.OPTIMIZER))

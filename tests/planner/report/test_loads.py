"""The loads in a report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from reported import Document, branching, report_of, small_cluster, source_of

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_json
from pipeplan.report.source import ReportSource, read_report_source
from pipeplan.util.files import Node


def test_the_step_time_is_the_plans_and_its_slowest_resource_has_all_of_it(
    source: ReportSource, document: Document
) -> None:
    said = document["prediction"]
    assert said["minibatch_s"] == pytest.approx(source.step_time_s, rel=1e-5)
    assert said["samples_per_s"] == pytest.approx(64 / source.step_time_s, rel=1e-5)
    loads = document["loads"]
    first = loads[0]
    assert first["name"] == said["bound_by"]
    assert first["binds"] is True
    assert first["share"] == pytest.approx(1, rel=1e-5)
    seconds = [load["seconds"] for load in loads]
    assert seconds == sorted(seconds, reverse=True)


def even(layers: int, first_s: float, weights: int, crossing: int) -> Profile:
    """A chain of equal layers, except for the forward time of the first."""
    made = tuple(Layer(f"l{i}", 1e-3 if i else first_s, 2e-3, weights, 1000) for i in range(layers))
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), crossing, crossing) for i in range(layers - 1))
    return Profile(made, tensors, minibatch=1)


@pytest.mark.slow
def test_one_resource_binds_however_its_name_begins() -> None:
    """The first of twelve stages binds; there is a tenth as well."""
    profile = even(12, 2e-3, 10**7, 100)
    found = source_of(profile, small_cluster(6, 2), Options(stages=12, max_replicas=1))
    assert [load["name"] for load in report_of(found)["loads"] if load["binds"]] == ["compute of stage 1"]


def test_with_a_flush_the_parts_add_up() -> None:
    found = source_of(branching(4), small_cluster(), Options(schedule="1f1b-flush", accumulate=2, stages=2))
    loads = report_of(found)["loads"]
    parts = [load for load in loads if load["part"]]
    assert loads[: len(parts)] == parts
    assert sum(load["share"] for load in parts) == pytest.approx(1, rel=1e-4)
    assert "traffic from stage 1 to stage 2" in [load["name"] for load in loads[len(parts) :]]
    assert found.root.value["prediction"]["bound_by"] == "filling and draining the pipeline"
    assert [load["name"] for load in loads if load["binds"]] == [
        "the first microbatch's passes: filling and draining",
        "its transfers",
    ]


def test_the_wait_of_plain_data_parallelism_binds() -> None:
    """Three layers on four workers: backward takes 1 s for c, 1 for b and 4 for a; 5.5 s of the all-reduce are left.

    Their buckets of 2, 30 and 8 MiB travel for 0.5, 7.5 and 2 s: c's from 1 to 1.5, b's from 2 to 9.5, a's to 11.5.
    """
    mib, huge = 2**20, 10**9
    layers = (
        Layer("a", 1.0, 4.0, 8 * mib, 0),
        Layer("b", 1.0, 1.0, 30 * mib, 0),
        Layer("c", 1.0, 1.0, 2 * mib, 0, update_s=1.0),
    )
    tensors = (Tensor("x", "a", ("b",), huge, huge), Tensor("y", "b", ("c",), huge, huge))
    cluster = Cluster("t", Device("d", "cuda", 2**40), (Level("server", 4, 6.0 * mib),))
    found = source_of(Profile(layers, tensors, 1), cluster)
    assert found.plan.config == "4"
    told = report_of(found)
    first, *others = told["loads"]
    assert first["name"] == "gradient synchronisation of stage 1, for which the next forward pass waits"
    assert first["seconds"] == pytest.approx((3 + 6 + 1 + 5.5) / 4, rel=1e-5)
    assert (first["share"], first["binds"]) == (1, True)
    assert [one["name"] for one in others] == ["compute of stage 1", "port of worker 0, outgoing"]
    assert not any(one["binds"] for one in others)


@pytest.mark.slow
def test_a_card_that_stages_share_binds() -> None:
    """Two stages on two servers of two, each replicated across both, so that everything crosses the cards."""
    problem = Problem(even(4, 1e-3, 10**6, 10**5), small_cluster())
    names = problem.layer_names
    plan = Plan((Stage(names[:2], (0, 2), 99, 99), Stage(names[2:], (1, 3), 9, 9)))
    outcome = solve(problem, Settings(solver="dp", certify=False))
    crossing = replace(outcome, plan=plan, evaluation=evaluate(plan, problem))
    found = read_report_source(
        Node(json.loads(json.dumps(plan_json.plan_document(crossing))), "plan.json"), problem.profile
    )
    first, *others = report_of(found)["loads"]
    assert first["name"].startswith("network card of server")
    assert (first["share"], first["binds"]) == (1, True)
    assert len(others) >= 3
    assert not any(one["binds"] for one in others)

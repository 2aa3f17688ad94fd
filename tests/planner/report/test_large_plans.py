"""What a report leaves out of large plans, and folds of large models."""

from __future__ import annotations

import itertools

import pytest
from reported import branching, report_of, small_cluster, source_of

from pipeplan.drawing.model_graph import MAX_NODES, MAX_SINGLE_LAYERS, NODE_SIZE, layer_groups
from pipeplan.problem.options import Options
from pipeplan.profile_data.layers import Layer, Tensor, edges
from pipeplan.profile_data.profile import Profile
from pipeplan.report import timeline as timeline_module
from pipeplan.report.build import report_page
from pipeplan.report.timeline import MAX_LANES, pipeline_timeline, shown_lanes, simulate_for_report
from pipeplan.simulation.scenario import Scenario, StageBoundary, StageLoad
from pipeplan_launch.plan.schedule import SCHEDULES


def pipeline(replicas: list[int], depth: int = 2) -> Scenario:
    """A pipeline whose stages all keep a step time of a second a minibatch."""
    firsts = [0, *itertools.accumulate(replicas)]
    stages = tuple(
        StageLoad(tuple(range(first, first + count)), depth, 0.4 * count, 0.6 * count, 0.0)
        for first, count in zip(firsts, replicas, strict=False)
    )
    hops = ((StageBoundary(0.01, 0.0),),) * (len(replicas) - 1)
    return Scenario("-".join(map(str, replicas)), stages, hops, SCHEDULES["1f1b-stashing"], 1.0, 1.0, 1, 8)


def test_every_stage_is_seen_and_no_more_workers_than_fit() -> None:
    for replicas in ([64], [3, 1], [1] * 64, [1000, 24], [8, 9, 25, 931], [1] * 892):
        shown = shown_lanes(pipeline(replicas))
        assert len(shown.places) == min(sum(replicas), MAX_LANES)
        stages = [stage for stage, _ in shown.places]
        assert stages == sorted(stages)
        assert {0, len(replicas) - 1} <= set(stages)
        assert len(replicas) > MAX_LANES or set(stages) == set(range(len(replicas)))
        for stage in set(stages):
            mine = [replica for index, replica in shown.places if index == stage]
            assert mine == list(range(len(mine)))
        assert bool(shown.omitted) == (sum(replicas) > MAX_LANES)


def test_a_long_timeline_ends_where_it_would_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = simulate_for_report(pipeline([1] * 6, depth=12))
    whole = pipeline_timeline(simulated)
    most = len(whole.predicted["lane"]) // 2
    monkeypatch.setattr(timeline_module, "MAX_INTERVALS", most)
    drawn = pipeline_timeline(simulated)
    assert 0.9 * most < len(drawn.predicted["lane"]) <= most
    assert max(drawn.predicted["start_s"]) < drawn.end_s < whole.end_s
    assert drawn.minibatches < whole.minibatches


def test_a_simulation_that_would_take_long_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "MAX_PASSES", 100)
    monkeypatch.setattr(timeline_module, "MAX_PASSES_WITHOUT_CARDS", 2000)
    simulated = simulate_for_report(pipeline([1] * 30, depth=60))
    assert simulated.report.minibatches * 2 * 30 <= 2000
    assert f"covers only {simulated.report.minibatches} microbatches" in simulated.remark
    assert pipeline_timeline(simulated).steady is None


def wide(blocks: int) -> Profile:
    """Blocks of two branches that join, one after the other: layers that no chain can swallow."""
    layers, tensors = [Layer("start", 1e-3, 1e-3, 10, 10)], []
    last = "start"
    for block in range(blocks):
        names = [f"b{block}.{part}" for part in ("left", "right", "join")]
        layers += [Layer(name, 1e-3, 2e-3, 100, 10, op=name[-4:]) for name in names]
        tensors.append(Tensor(f"{last}:out", last, tuple(names[:2]), 50, 50))
        tensors += [Tensor(f"{name}:out", name, (names[2],), 20, 20) for name in names[:2]]
        last = names[2]
    return Profile(layers=tuple(layers), tensors=tuple(tensors), minibatch=1, model_name="wide")


def test_what_is_drawn_as_one_is_of_one_stage_and_no_arrow_goes_back() -> None:
    sizes = MAX_SINGLE_LAYERS, MAX_SINGLE_LAYERS + 1, 1500
    for profile in (*map(branching, sizes), wide(60), wide(300)):
        names = [layer.name for layer in profile.layers]
        stage_of = {name: at * 5 // len(names) for at, name in enumerate(names)}
        found, note = layer_groups(profile, stage_of)
        assert sorted(layer.name for group in found for layer in group.layers) == sorted(names)
        assert all({stage_of[layer.name] for layer in group.layers} == {group.stage} for group in found)
        home = {layer.name: number for number, group in enumerate(found) for layer in group.layers}
        assert all(home[producer] <= home[consumer] for producer, consumer in edges(profile.tensors))
        assert len(found) <= MAX_NODES + 5
        assert bool(note) == (len(found) < len(names))
        if len(names) <= MAX_SINGLE_LAYERS:
            assert [group.layers for group in found] == [(layer,) for layer in profile.layers]


@pytest.mark.parametrize("layers", [8, pytest.param(150, marks=pytest.mark.slow)], ids=str)
def test_the_graph_has_all_layers_and_arrows_and_boxes_apart(layers: int) -> None:
    profile = branching(layers)
    found = source_of(profile, small_cluster(), Options(max_stages=3))
    report = report_of(found)
    drawn, nodes = report["graph"], report["graph"]["nodes"]
    assert sum(nodes["layers"]) == layers
    assert sum(nodes["forward_s"]) + sum(nodes["backward_s"]) == pytest.approx(profile.total_s, rel=1e-4)
    assert sum(nodes["parameter_bytes"]) == sum(layer.parameter_bytes for layer in profile.layers)
    corners = list(zip(nodes["x"], nodes["y"], strict=True))
    for (x, y), (to_x, to_y) in itertools.combinations(corners, 2):
        assert abs(x - to_x) >= NODE_SIZE[0] or abs(y - to_y) >= NODE_SIZE[1]
    assert all(0 <= x <= drawn["width"] - NODE_SIZE[0] and 0 <= y <= drawn["height"] - NODE_SIZE[1] for x, y in corners)
    assert all(0 <= edge[0] < len(drawn["edges"]) for edge in drawn["bends"])
    if layers == 8:
        number = {name: at for at, name in enumerate(nodes["name"])}
        arrows = {(number[producer], number[consumer]) for producer, consumer in edges(profile.tensors)}
        assert set(map(tuple, drawn["edges"])) == arrows
        stage_of = {name: stage for stage, one in enumerate(found.plan.stages) for name in one.layers}
        assert [stage_of[name] for name in nodes["name"]] == nodes["stage"]
    drawing = report_page(report).split('<div id="graph" hidden>')[1].split("</svg>")[0]
    assert drawing.count('<g class="card stage-') == len(nodes["name"]), "the page has a card for each layer"
    assert drawing.count('class="card stage-1"') == nodes["stage"].count(1)
    path = drawing.split('<path class="edge" d="')[1].split('"')[0]
    assert path.count("M") == len(drawn["edges"])

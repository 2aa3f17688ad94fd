"""What a report draws, held to what can be worked out by hand, and what it leaves out of large plans."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from reported import Document, branching, report_of, rows, small_cluster, source_of, vgg

from pipeplan.drawing.model_graph import MAX_NODES, MAX_SINGLE_LAYERS, NODE_SIZE, layer_groups
from pipeplan.problem.options import Options, Sharding
from pipeplan.profile_data.layers import Layer, Tensor, edges
from pipeplan.profile_data.profile import Profile
from pipeplan.report import timeline as timeline_module
from pipeplan.report.build import report_page
from pipeplan.report.source import ReportSource
from pipeplan.report.stages import stage_rows
from pipeplan.report.timeline import MAX_LANES, pipeline_timeline, shown_lanes, simulate_for_report
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.metrics import enough_minibatches, summarise_simulation
from pipeplan.simulation.scenario import Scenario, StageBoundary, StageLoad
from pipeplan_launch.plan.schedule import SCHEDULES

F, B, _, U, _ = range(5)


def _lanes(document: Document, kinds: tuple[int, ...] = (F, B, U)) -> dict[int, list[tuple[Any, ...]]]:
    found: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for lane, kind, number, start, end in rows(document["timeline"]["predicted"]):
        if kind in kinds:
            found[lane].append((start, end, kind, number))
    return found


def test_memory_is_made_of_what_the_layers_have(source: ReportSource, document: Document) -> None:
    layers = {layer.name: layer for layer in vgg().layers}
    for stage, row in zip(source.plan.stages, document["stages"], strict=True):
        parts = dict(row["memory_parts"])
        assert sum(parts.values()) == row["memory_bytes"]
        parameters = sum(layers[name].parameter_bytes for name in stage.layers)
        assert next(size for name, size in parts.items() if name.startswith("weights")) == stage.versions * parameters
        assert parts["gradients"] == parts["optimiser's state"] == parameters, "SGD with momentum keeps one for each"
        saved = sum(layers[name].saved_bytes for name in stage.layers)
        crossing = row["send_bytes"] if row["index"] == 0 else document["stages"][0]["send_bytes"]
        (activations,) = (size for name, size in parts.items() if name.startswith("activations"))
        assert activations == stage.depth * (saved + crossing)
        assert "the largest workspace of a layer" not in parts, "the profile has none"
        assert row["capacity_bytes"] == int(0.95 * 16 * 2**30), "a part is kept in reserve"


def test_memory_has_the_largest_workspace_of_a_stage() -> None:
    profile = branching()
    sized = replace(profile, layers=tuple(replace(one, workspace_bytes=7 + n) for n, one in enumerate(profile.layers)))
    plain, found = (source_of(one, small_cluster(), Options(max_replicas=1)) for one in (profile, sized))
    largest = {layer.name: layer.workspace_bytes for layer in sized.layers}
    assert len(found.plan.stages) > 1
    for stage, before, after in zip(found.plan.stages, stage_rows(plain), stage_rows(found), strict=True):
        workspace = max(largest[name] for name in stage.layers)
        added = {"the largest workspace of a layer": workspace}
        assert dict(after.memory_parts) == dict(before.memory_parts) | added
        assert after.memory_bytes == before.memory_bytes + workspace


def test_what_is_drawn_keeps_the_step_time_that_simulate_tells(source: ReportSource, document: Document) -> None:
    count = enough_minibatches(source.scenario)
    steady = summarise_simulation(source.scenario, simulate_schedule(source.scenario, count), count).steady
    assert steady is not None
    since, until = document["timeline"]["steady"]
    assert until == document["timeline"]["end_s"]
    lanes = document["timeline"]["lanes"]
    ends = sorted(
        end
        for lane, kind, _, _, end in rows(document["timeline"]["predicted"])
        if kind == B and lanes["stage"][lane] == 0 and since + 1e-5 < end <= until + 1e-5
    )
    assert len(ends) >= 15
    assert (until - since) / len(ends) == pytest.approx(steady.step_time_s, rel=1e-3)


def test_links_carry_what_crosses_the_cut_and_what_a_ring_sends(source: ReportSource, document: Document) -> None:
    profile, (first, _) = vgg(), source.plan.stages
    inside = set(first.layers)
    crossing = [one for one in profile.tensors if one.producer in inside and not inside >= set(one.consumers)]
    loads = {load["name"]: load for load in document["loads"]}
    boundary = loads["traffic from stage 1 to stage 2"]
    both = sum(one.bytes + one.gradient_bytes for one in crossing)
    assert boundary["bytes_per_minibatch"] == pytest.approx(both, rel=1e-5)
    assert boundary["rate"] == 25e9 / 8, "the workers of both stages are on both servers"
    assert boundary["simulated_busy"] >= boundary["share"], "more where cards are shared"
    replicas, weights = 15, sum(one.parameter_bytes for one in profile.layers if one.name in inside)
    ring = loads["gradient synchronisation of stage 1"]
    assert ring["bytes_per_minibatch"] == pytest.approx(2 * (replicas - 1) / replicas * weights / replicas, rel=1e-5)
    cards = [load for load in document["loads"] if load["name"].startswith("network card")]
    assert len(cards) == 4, "both ways of both servers"
    for card in cards:
        assert card["bytes_per_minibatch"] == pytest.approx(card["rate"] * card["seconds"], rel=1e-4)


def test_memory_over_time_goes_up_and_down_by_minibatches_to_the_peaks_of_the_simulation(
    source: ReportSource, document: Document
) -> None:
    last = document["memory"][-1]
    load = source.scenario.stages[-1]
    least = load.memory_bytes - load.minibatch_bytes - (load.versions - 1) * load.parameter_bytes
    assert load.depth == load.versions == 1
    assert set(last["predicted"]["bytes"]) == {least, least + load.minibatch_bytes}
    for one, stage in zip(document["memory"], source.scenario.stages, strict=True):
        assert max(one["predicted"]["bytes"]) <= one["peak_bytes"] <= one["planned_bytes"] == stage.memory_bytes
        assert one["predicted"]["t"] == sorted(one["predicted"]["t"])
        assert one["worker"] in stage.workers
    for name, accumulate in (("gpipe", 4), ("vertical-sync", None)):
        found = source_of(branching(), small_cluster(), Options(schedule=name, max_replicas=1, accumulate=accumulate))
        count = enough_minibatches(found.scenario)
        seen = summarise_simulation(found.scenario, simulate_schedule(found.scenario, count), count)
        peaks = [stage.peak_bytes for stage in seen.stages]
        assert [one["peak_bytes"] for one in report_of(found)["memory"]] == peaks


def test_every_worker_is_placed_once_and_does_one_thing_at_a_time_for_as_long_as_planned(
    source: ReportSource, document: Document, straight: ReportSource
) -> None:
    placed = [worker for server in document["placement"] for worker in server["workers"]]
    assert [worker for worker, _ in placed] == list(range(16))
    assert all(worker in source.plan.stages[stage].workers for worker, stage in placed)
    assert [server["server"] for server in document["placement"]] == [0, 1]
    for found, told in ((source, document), (straight, report_of(straight))):
        lanes = told["timeline"]["lanes"]
        assert lanes["worker"] == [worker for stage in found.plan.stages for worker in stage.workers]
        for lane, done in _lanes(told).items():
            stage = found.scenario.stages[lanes["stage"][lane]]
            for (_, end, *_), (start, *_) in itertools.pairwise(sorted(done)):
                assert start >= end - 1e-5
            step_s = stage.update_share * stage.backward_s
            seconds = {F: stage.forward_s, B: stage.backward_s - step_s, U: step_s}
            for start, end, kind, number in done:
                if kind in seconds:
                    assert end - start == pytest.approx(seconds[kind], abs=2e-5)
                if kind in (F, B):
                    assert number % len(stage.workers) == stage.workers.index(lanes["worker"][lane])


DIVIDED = (
    Options(sharding=Sharding.OPTIMIZER),
    Options(schedule="zb-h1", accumulate=8, stages=3),
    Options(schedule="zb-h1", accumulate=8, stages=2, sharding=Sharding.OPTIMIZER),
    Options(schedule="2bw", accumulate=8, correction="ef", sharding=Sharding.OPTIMIZER),
    Options(schedule="gpipe", accumulate=4, recompute=True),
)


def test_the_parts_of_memory_add_up_to_it() -> None:
    """And what is called messages and buffers is these."""
    profile = replace(branching(), optimizer_state_ratio=4.0)
    buffers = {layer.name: layer.buffer_bytes for layer in profile.layers}
    for options in DIVIDED:
        found = source_of(profile, small_cluster(), options)
        for stage, row in zip(found.plan.stages, stage_rows(found), strict=True):
            parts = dict(row.memory_parts)
            assert abs(sum(parts.values()) - row.memory_bytes) <= 1
            shards = stage.replicas if options.shard_optimizer else 1
            assert parts["optimiser's state"] == pytest.approx(4.0 * row.parameter_bytes / shards, abs=1)
            messages = parts.get("messages and buffers", 0) - sum(buffers[name] for name in stage.layers)
            crossing = row.send_bytes + row.return_bytes
            before = found.root["prediction"]["stages"].items()[row.index]
            crossing += before["receive_bytes"].integer() + before["send_gradient_bytes"].integer()
            assert messages == pytest.approx(crossing, abs=2)


def test_data_parallelism_has_the_name_and_the_limit_that_the_screen_has_and_holds_its_shards() -> None:
    """One stage has no pipeline to fill."""
    light = replace(branching(), layers=tuple(replace(one, parameter_bytes=8) for one in branching().layers))
    for sharding, name in ((Sharding.NONE, "DDP on 4 workers"), (Sharding.FULL, "FSDP on 4 workers")):
        told = report_of(source_of(light, small_cluster(), replace(ALONE, sharding=sharding)))
        assert told["title"] == f"small on tiny: {name}"
        assert (told["made"]["name"], told["made"]["manner"]) == (name, "trains like one process")
        assert told["prediction"]["bound_by"] == "compute of stage 1"
        assert [one["name"] for one in told["loads"] if one["binds"]][-1] == "compute of stage 1"
    for sharding, shards in ((Sharding.FULL, 4), (Sharding.HYBRID, 2)):
        (row,) = stage_rows(source_of(branching(), small_cluster(), replace(ALONE, sharding=sharding)))
        parts = dict(row.memory_parts)
        assert sum(parts.values()) == row.memory_bytes
        assert parts["shard of the weights"] == parts["shard of the gradients"] == round(row.parameter_bytes / shards)
        assert parts["shard of the optimiser's state"] == pytest.approx(2 * row.parameter_bytes / shards, abs=1)
        assert parts["gathered weights and gradients, and buffers"] > 0


ALONE = Options(stages=1, schedule="1f1b-flush", accumulate=8)


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
        shown, omitted = shown_lanes(pipeline(replicas))
        assert len(shown) == min(sum(replicas), MAX_LANES)
        stages = [stage for stage, _ in shown]
        assert stages == sorted(stages)
        assert {0, len(replicas) - 1} <= set(stages)
        assert len(replicas) > MAX_LANES or set(stages) == set(range(len(replicas)))
        for stage in set(stages):
            mine = [replica for index, replica in shown if index == stage]
            assert mine == list(range(len(mine)))
        assert bool(omitted) == (sum(replicas) > MAX_LANES)


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

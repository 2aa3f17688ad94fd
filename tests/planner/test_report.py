"""What a report draws, held to what can be worked out from the profile, the plan and the schedule by hand."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from reported import Document, branching, report_of, rows, small_cluster, source_of, vgg, write_run

from pipeplan.cuts import enumerate_cuts
from pipeplan.errors import InputError
from pipeplan.explain import stored
from pipeplan.explain.alternatives import alternatives
from pipeplan.files import Node
from pipeplan.measured import run as runs
from pipeplan.problem import Options, Problem
from pipeplan.profile import Layer, Profile, Tensor
from pipeplan.report.build import build
from pipeplan.report.document import KINDS
from pipeplan.report.page import embedded, page
from pipeplan.report.source import Source, read
from pipeplan.simulate.engine import replay
from pipeplan.simulate.report import enough_minibatches, measure
from pipeplan.solve import Settings, solve

F, B, U, WAIT, REDUCE = range(5)


@pytest.fixture(scope="module")
def source() -> Source:
    """VGG-16 on two servers of eight: one wide stage, and one behind it."""
    return source_of(vgg(), "B")


@pytest.fixture(scope="module")
def document(source: Source) -> Document:
    """Its report."""
    return report_of(source)


@pytest.fixture(scope="module")
def straight() -> Source:
    """A pipeline of three stages and more, of a model that branches."""
    return source_of(branching(), small_cluster(), Options(max_replicas=1, allow_copies=False))


def _lanes(document: Document, kinds: tuple[int, ...] = (F, B, U)) -> dict[int, list[tuple[Any, ...]]]:
    found: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for lane, kind, number, start, end in rows(document["timeline"]["predicted"]):
        if kind in kinds:
            found[lane].append((start, end, kind, number))
    return found


def test_the_pace_is_the_plans_and_its_slowest_resource_has_all_of_it(source: Source, document: Document) -> None:
    said = document["prediction"]
    assert said["minibatch_s"] == pytest.approx(source.pace_s, rel=1e-5)
    assert said["samples_per_s"] == pytest.approx(64 / source.pace_s, rel=1e-5)
    first = said["bounds"][0]
    assert first["what"] == said["bound_by"]
    assert first["binds"] is True
    assert first["share"] == pytest.approx(1, rel=1e-5)
    seconds = [bound["seconds"] for bound in said["bounds"]]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.slow
def test_one_resource_binds_however_its_name_begins() -> None:
    """The first of twelve stages binds; there is a tenth as well."""
    layers = tuple(Layer(f"l{i}", 2e-3 if i == 0 else 1e-3, 2e-3, 10**7, 1000) for i in range(12))
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), 100, 100) for i in range(11))
    profile = Profile(layers=layers, tensors=tensors, minibatch=1)
    found = source_of(profile, small_cluster(6, 2), Options(stages=12, max_replicas=1))
    for known in (profile, None):
        bounds = report_of(read(found.root, known))["prediction"]["bounds"]
        assert [bound["what"] for bound in bounds if bound["binds"]] == ["compute of stage 1"]


def test_with_a_flush_the_parts_add_up() -> None:
    found = source_of(branching(4), small_cluster(), Options(schedule="1f1b-flush", accumulate=2, stages=2))
    for profile in (branching(4), None):
        bounds = report_of(read(found.root, profile))["prediction"]["bounds"]
        assert sum(bound["share"] for bound in bounds) == pytest.approx(1, rel=1e-4)
        assert found.root.value["prediction"]["bound_by"] == "filling and draining the pipeline"
        assert [b["what"] for b in bounds if b["binds"]] == [
            "the first minibatch's passes: filling and draining",
            "its transfers",
        ]


def test_without_the_profile_computing_and_links_are_those_of_plan_json(source: Source, document: Document) -> None:
    alone = report_of(read(source.root, None))["prediction"]["bounds"]
    known = {bound["what"]: bound["seconds"] for bound in document["prediction"]["bounds"]}
    assert len(alone) >= 4
    for bound in alone:
        assert bound["seconds"] == pytest.approx(known[bound["what"]], rel=1e-4)


def test_memory_is_made_of_what_the_layers_have(source: Source, document: Document) -> None:
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
        assert row["capacity_bytes"] == 16 * 2**30


def test_memory_over_time_goes_up_and_down_by_minibatches(source: Source, document: Document) -> None:
    last = document["memory"][-1]
    load = source.scenario.stages[-1]
    least = load.memory_bytes - load.minibatch_bytes - (load.versions - 1) * load.parameter_bytes
    assert load.depth == load.versions == 1
    assert set(last["predicted"]["bytes"]) == {least, least + load.minibatch_bytes}
    for one, stage in zip(document["memory"], source.scenario.stages, strict=True):
        assert max(one["predicted"]["bytes"]) <= one["peak_bytes"] <= one["planned_bytes"] == stage.memory_bytes
        assert one["predicted"]["t"] == sorted(one["predicted"]["t"])
        assert one["worker"] in stage.workers


@pytest.mark.parametrize("name", [pytest.param("gpipe", marks=pytest.mark.slow), "vertical-sync"])
def test_peaks_are_those_of_the_simulation(name: str) -> None:
    found = source_of(
        branching(), small_cluster(), Options(schedule=name, max_replicas=1, accumulate=4 if name == "gpipe" else None)
    )
    count = enough_minibatches(found.scenario)
    seen = measure(found.scenario, replay(found.scenario, count), count)
    assert [one["peak_bytes"] for one in report_of(found)["memory"]] == [stage.peak_bytes for stage in seen.stages]


def test_what_is_drawn_keeps_the_pace_that_simulate_tells(source: Source, document: Document) -> None:
    count = enough_minibatches(source.scenario)
    steady = measure(source.scenario, replay(source.scenario, count), count).steady
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
    assert (until - since) / len(ends) == pytest.approx(steady.pace_s, rel=1e-3)


@pytest.mark.parametrize("which", ["wide", "straight"])
def test_a_worker_does_one_thing_at_a_time_for_as_long_as_planned(
    which: str, source: Source, document: Document, straight: Source
) -> None:
    found, told = (source, document) if which == "wide" else (straight, report_of(straight))
    lanes = told["timeline"]["lanes"]
    assert lanes["worker"] == [worker for stage in found.plan.stages for worker in stage.workers]
    for lane, done in _lanes(told).items():
        stage = found.scenario.stages[lanes["stage"][lane]]
        for (_, end, *_), (start, *_) in itertools.pairwise(sorted(done)):
            assert start >= end - 1e-5
        seconds = {F: stage.forward_s, B: stage.backward_s}
        for start, end, kind, number in done:
            if kind in seconds:
                assert end - start == pytest.approx(seconds[kind], abs=2e-5)
                assert number % len(stage.workers) == stage.workers.index(lanes["worker"][lane])


def test_a_minibatch_goes_through_the_stages_and_back(straight: Source) -> None:
    told = report_of(straight)
    assert len(straight.plan.stages) >= 3
    lanes = told["timeline"]["lanes"]
    begun: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
    for lane, kind, number, start, _ in rows(told["timeline"]["predicted"]):
        if kind in (F, B):
            begun[number].append((start, kind, lanes["stage"][lane]))
    stages = len(straight.plan.stages)
    way = [(F, stage) for stage in range(stages)] + [(B, stage) for stage in reversed(range(stages))]
    whole = [sorted(passes) for passes in begun.values() if len(passes) == 2 * stages]
    assert len(whole) >= 8
    assert all([(kind, stage) for _, kind, stage in passes] == way for passes in whole)


def test_links_carry_what_crosses_the_cut_and_what_a_ring_sends(source: Source, document: Document) -> None:
    profile, (first, _) = vgg(), source.plan.stages
    inside = set(first.layers)
    crossing = [one for one in profile.tensors if one.producer in inside and not inside >= set(one.consumers)]
    links = {link["name"]: link for link in document["links"]}
    there, back = links["stage 1 → 2"], links["stage 2 → 1"]
    assert there["bytes_per_minibatch"] == pytest.approx(sum(one.bytes for one in crossing), rel=1e-5)
    assert back["bytes_per_minibatch"] == pytest.approx(sum(one.gradient_bytes for one in crossing), rel=1e-5)
    assert there["rate"] == 25e9 / 8, "the workers of both stages are on both servers"
    assert there["busy"] >= there["bytes_per_minibatch"] / there["rate"] / source.pace_s, "more where cards are shared"
    replicas, weights = 15, sum(one.parameter_bytes for one in profile.layers if one.name in inside)
    ring = links["all-reduce of stage 1"]
    assert ring["bytes_per_minibatch"] == pytest.approx(2 * (replicas - 1) / replicas * weights / replicas, rel=1e-5)
    busiest = max((link for link in document["links"] if link["kind"] == "card"), key=lambda link: link["busy"])
    card = next(b for b in document["prediction"]["bounds"] if b["what"].startswith("network card"))
    assert (busiest["name"], busiest["busy"]) == (card["what"], pytest.approx(card["share"], rel=1e-4))


def test_a_link_of_its_own_is_busy_for_what_it_carries() -> None:
    alone = source_of(branching(), small_cluster(), Options(contention=False, max_replicas=1, allow_copies=False))
    links = [link for link in report_of(alone)["links"] if link["kind"] == "boundary"]
    assert len(links) == 2 * (len(alone.plan.stages) - 1) > 0
    for link in links:
        carried_s = link["bytes_per_minibatch"] / link["rate"]
        assert link["busy"] == pytest.approx(carried_s / alone.pace_s, rel=0.01)


def test_every_worker_is_placed_once(source: Source, document: Document) -> None:
    placed = [worker for server in document["placement"] for worker in server["workers"]]
    assert [worker for worker, _ in placed] == list(range(16))
    for worker, stage in placed:
        assert worker in source.plan.stages[stage].workers
    assert [server["server"] for server in document["placement"]] == [0, 1]


def test_baselines_are_those_of_the_plan_and_the_runner_up_is_another(source: Source, document: Document) -> None:
    this, *others = document["comparisons"]
    assert (this["config"], this["gain"]) == (source.plan.config, 1)
    said = {one["name"]: one for one in source.root.value["baselines"]}
    for one in others[:-1]:
        assert one["minibatch_s"] == pytest.approx(said[one["name"]]["minibatch_s"], rel=1e-5)
        assert one["gain"] == pytest.approx(one["minibatch_s"] / source.pace_s, rel=1e-4)
    assert others[-1]["name"] == "runner-up"
    assert others[-1]["config"] != source.plan.config
    assert others[-1]["minibatch_s"] >= source.pace_s * (1 - 1e-5)


def test_the_curve_is_what_solving_for_each_size_gives() -> None:
    source = source_of(branching(5), small_cluster())
    assert source.known is not None
    scaling = report_of(source)["scaling"]
    points = scaling["points"]
    assert (points["servers"], points["workers"], scaling["here"]) == ([1, 2, 4], [2, 4, 8], 1)
    for servers, pace, parallel in zip(
        points["servers"], points["minibatch_s"], points["data_parallelism_s"], strict=True
    ):
        problem = source.known.problem.within(source.cluster.with_servers(servers))
        outcome = solve(problem, Settings(solver="dp", certify=False))
        assert pace == pytest.approx(outcome.evaluation.pace_s, rel=1e-5)
        assert parallel == pytest.approx(outcome.baselines[0].pace_s, rel=1e-5)


def test_one_server_scales_by_its_workers(straight: Source) -> None:
    one = source_of(branching(), small_cluster(1, 3))
    assert report_of(one)["scaling"]["points"]["workers"] == [1, 2, 3]


def test_a_larger_cluster_is_never_slower_in_the_curve() -> None:
    """Its own plan may be, as the search for one that shares cards well has no proof."""
    links = report_of(source_of(branching(5), small_cluster(3, 2)))["scaling"]["points"]
    paces = links["minibatch_s"][links["workers"].index(6) :]
    assert len(paces) >= 2
    assert paces == sorted(paces, reverse=True)


def test_inference_has_no_gradients() -> None:
    told = report_of(source_of(branching(), small_cluster(), Options(inference=True)))
    assert told["made"]["mode"] == "inference"
    assert set(told["timeline"]["predicted"]["kind"]) == {F}
    assert not [link for link in told["links"] if link["kind"] == "all-reduce"]
    for stage in told["stages"]:
        assert sum(size for _, size in stage["memory_parts"]) == stage["memory_bytes"]


def test_copies_of_a_pipeline_have_links_of_their_own() -> None:
    found = source_of(branching(), small_cluster(4, 2), Options(stages=2, max_replicas=1))
    assert found.plan.copies > 1
    told = report_of(found)
    names = [link["name"] for link in told["links"] if link["kind"] == "boundary"]
    assert {name.split(", ")[1] for name in names} == {f"copy {copy + 1}" for copy in range(found.plan.copies)}
    sent = sum(link["bytes_per_minibatch"] for link in told["links"] if link["name"].startswith("stage 1 → 2"))
    assert sent == pytest.approx(told["stages"][0]["send_bytes"], rel=1e-5)


def test_a_run_stands_beside_the_prediction(straight: Source, tmp_path: Path) -> None:
    run = runs.read(write_run(tmp_path / "run", straight))
    told = build(straight, run).to_json()
    assert told["measured"]["ratio"] == 1.25
    assert told["measured"]["minibatch_s"] == pytest.approx(1.25 * straight.pace_s, rel=1e-5)
    assert told["measured"]["stages"][0]["load_s"] == 0.002
    assert told["measured"]["stages"][0]["send_s"] is None
    stages = straight.scenario.stages
    assert [one["measured_peak_bytes"] for one in told["memory"]] == [
        round(1.25 * stage.memory_bytes) for stage in stages
    ]
    seen = rows(told["timeline"]["measured"])
    lanes = told["timeline"]["lanes"]
    for lane, worker in enumerate(lanes["worker"]):
        mine = [one for one in seen if one[0] == lane]
        assert [KINDS[one[1]] for one in mine].count("forward") == 6, f"worker {worker}"
    assert told["timeline"]["minibatches"] == 6, "as many are predicted as were recorded"
    assert any("stage 0 computes for longer" in sentence for sentence in told["words"]["measured"])
    assert "Measured is 80% of the predicted pace." in told["words"]["summary"]


def test_a_run_without_timelines_still_has_its_table(straight: Source, tmp_path: Path) -> None:
    told = build(straight, runs.read(write_run(tmp_path / "run", straight, timelines=False))).to_json()
    assert told["timeline"]["measured"] is None
    assert any("recorded no timeline" in sentence for sentence in told["words"]["measured"])


def test_how_busy_an_all_reduce_was_is_its_share_of_what_was_recorded(tmp_path: Path) -> None:
    wide = source_of(branching(), small_cluster())
    assert max(stage.replicas for stage in wide.plan.stages) > 1
    told = build(wide, runs.read(write_run(tmp_path / "run", wide))).to_json()
    rings = [link for link in told["links"] if link["kind"] == "all-reduce"]
    longest = max(stage.forward_s for stage in wide.scenario.stages)
    for ring in rings:
        stage = wide.scenario.stages[int(ring["name"].split()[-1]) - 1]
        assert ring["measured_busy"] == pytest.approx(3 * stage.forward_s / (6 * longest), rel=1e-4)
    assert rings


def test_the_document_survives_the_page(source: Source) -> None:
    hostile = "</script><script>alert(1)</script>\u2028<!-- & \"'\\"
    root = json.loads(json.dumps(source.root.value))
    root["profile"]["model"] = hostile
    told = report_of(read(Node(root, "plan.json"), None))
    text = embedded(told)
    assert json.loads(text) == told
    assert not set(text) & set("<>&\u2028\u2029")
    whole = page(told)
    assert whole.count(text) == 1
    assert "<script>alert" not in whole


def test_what_the_plan_says_and_the_cost_model_does_not_is_told(straight: Source) -> None:
    root = json.loads(json.dumps(straight.root.value))
    root["prediction"]["minibatch_s"] *= 1.5
    notes = report_of(read(Node(root, "plan.json"), branching()))["notes"]
    assert any("solve again" in note for note in notes)


def test_both_solvers_prove_a_plan_and_one_alone_does_not() -> None:
    one = report_of(source_of(branching(4), small_cluster()))["certificate"]
    both = report_of(source_of(branching(4), small_cluster(), solver="both"))["certificate"]
    assert (one["proven"], both["proven"]) == (False, True)
    assert any("agree" in sentence for sentence in both["sentences"])


def test_what_contention_leaves_open_is_not_called_proven(straight: Source) -> None:
    """Two solvers that agree prove what is without shared cards; with them the plan may come with a gap."""
    root = json.loads(json.dumps(straight.root.value))
    root["verdict"] |= {"proven": True, "text": "proven optimal: all that without shared network cards"}
    root |= {"gap": 0.25, "bound_s": 0.75 * straight.pace_s}
    told = report_of(read(Node(root, "plan.json"), None))
    assert (told["certificate"]["proven"], told["certificate"]["gap"]) == (False, 0.25)
    assert "at most 25.00% could be gained" in " ".join(told["certificate"]["sentences"])
    assert "It is not proven to be the fastest" in " ".join(told["words"]["summary"])


def test_a_plan_of_no_time_is_refused(source: Source) -> None:
    root = json.loads(json.dumps(source.root.value))
    root["prediction"]["minibatch_s"] = 0.0
    with pytest.raises(InputError, match="more than 0 seconds"):
        read(Node(root, "plan.json"), None)


def test_thorough_finds_the_second_choice_that_explain_finds(straight: Source) -> None:
    assert straight.known is not None
    problem: Problem = straight.known.problem
    second = alternatives(problem, enumerate_cuts(problem, 1000), straight.plan, straight.pace_s).second
    assert second is not None
    last = report_of(straight, thorough=True)["comparisons"][-1]
    assert (last["name"], last["config"]) == ("runner-up", second.plan.config)
    assert last["minibatch_s"] == pytest.approx(second.pace_s, rel=1e-5)


def test_every_field_of_the_document_is_described(document: Document) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    text = page.split("## The document")[1]
    names = {name for name in document if name != "words"}
    for part in ("made", "prediction", "timeline", "graph", "scaling", "certificate"):
        names |= document[part].keys()
    for part in ("stages", "links", "memory", "comparisons", "placement"):
        names |= document[part][0].keys()
    names |= document["prediction"]["bounds"][0].keys() | document["graph"]["nodes"].keys()
    names |= document["scaling"]["points"].keys() | document["timeline"]["predicted"].keys()
    assert not {name for name in names if f"`{name}`" not in text}


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("pins", [[]], "pins.0.: expected a layer and its stage"),
        ("pins", 3, "pins: expected a list"),
        ("together", [3], "together.0.: expected a list"),
        ("no_cut_after", [1], "expected text"),
        ("max_stages", 2.5, "expected a whole number"),
        ("memory", "no", "expected true or false"),
    ],
)
def test_damaged_options_are_named(straight: Source, name: str, value: Any, complaint: str) -> None:
    root = json.loads(json.dumps(straight.root.value))
    root["options"][name] = value
    with pytest.raises(InputError, match=complaint):
        read(Node(root, "plan.json"), branching())


def test_every_option_is_read_back() -> None:
    options = Options(
        overlap=0.5,
        memory=False,
        max_replicas=3,
        allow_copies=False,
        recompute=False,
        contention=False,
        boundary="parallel",
        max_stages=3,
        max_workers=3,
        pins=(("l0", 1),),
        together=(("l2", "l3"),),
        no_cut_after=("l4",),
    )
    found = source_of(branching(), small_cluster(), options)
    assert found.known is not None
    assert found.known.problem.options == options
    assert set(stored.READERS) >= {field.name for field in fields(Options)}


def test_depths_that_keep_no_pace_are_refused() -> None:
    found = source_of(branching(4), small_cluster(), Options(schedule="gpipe", accumulate=4, max_replicas=1))
    root = json.loads(json.dumps(found.root.value))
    root["plan"]["accumulate"] = 80
    with pytest.raises(InputError, match="keep no pace at all"):
        read(Node(root, "plan.json"), branching(4))

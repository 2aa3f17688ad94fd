"""The files for every trainer have the stages, sizes and orders of the plan, as a separate parser or torch has it."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import chain, decoder, folded, grid, problem, tied_decoder
from torch import nn

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.exports import deepspeed, diffusion_pipe, megatron
from pipeplan.exports.layer_chains import chain_of
from pipeplan.exports.target import ExportFile, export_files, export_target
from pipeplan.exports.uniform_degrees import order_csv
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import FLUSH, GPIPE
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files as resources
from pipeplan_launch.plan.virtual_stages import interleaved_passes, looped_device, v_shaped_device, zero_bubble_v_passes

DECODER = decoder(6)


def recomputing_first(plan: Plan) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], recompute=True), *plan.stages[1:]))


def expanded(layout: str) -> list[str]:
    """The stages of a layout with one letter for each layer: `Et*2|L` has the stages `Ett` and `L`."""
    return re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), layout).split("|")


def arguments(folder: Path, made_of: Problem, plan: Plan) -> dict[str, str]:
    """The arguments and variables that bash reads from Megatron's fragment, by name."""
    (folder / megatron.FILE).write_text(export_files(megatron.TARGET, made_of, plan)[megatron.FILE].text)
    words = '"${PIPEPLAN_ARGS[@]}" nodes "$PIPEPLAN_NNODES" per-node "$PIPEPLAN_NPROC_PER_NODE"'
    script = f"set -eu; source ./{megatron.FILE}; printf '%s\\0' {words} world \"$PIPEPLAN_WORLD_SIZE\""
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    values, name = {}, ""
    for word in done.stdout.split("\0")[:-1]:
        if word.startswith("--") or word in ("nodes", "per-node", "world"):
            name, values[word] = word, ""
        else:
            values[name] = word
    return values


def test_megatron_gets_a_layout_with_the_blocks_of_every_stage(tmp_path: Path) -> None:
    for cuts, stages in (
        (["h.3.ln"], ["Ettt", "tttL"]),
        (["h.0.ln", "h.5.ln", "ln_f"], ["E", "ttttt", "t", "L"]),
        (["h.1.ln", "h.2.ln"], ["Et", "t", "ttttL"]),
    ):
        found = arguments(tmp_path, problem(DECODER), grid(DECODER, cuts, accumulate=8))
        assert expanded(found["--pipeline-model-parallel-layout"]) == stages
        assert found["--pipeline-model-parallel-size"] == str(len(stages))
        assert (found["--num-layers"], found["--tensor-model-parallel-size"]) == ("6", "1")
        assert "--untie-embeddings-and-output-weights" in found
    found = arguments(tmp_path, problem(DECODER, servers=2), grid(DECODER, ["h.3.ln"], replicas=4, accumulate=12))
    assert (found["--micro-batch-size"], found["--global-batch-size"]) == ("4", "48")
    assert (found["nodes"], found["per-node"], found["world"]) == ("2", "4", "8")
    text = export_files(
        megatron.TARGET,
        problem(DECODER, 2),
        folded(DECODER, ["h.1.ln", "h.3.ln", "h.5.ln"], "interleaved-1f1b", 8, replicas=2),
    )[megatron.FILE].text
    assert "--pipeline-model-parallel-size 2" in text
    assert "--pipeline-model-parallel-layout 'Et|t*2|t*2|tL'" in text
    assert "# stage 2, ranks 0-1: h.3 to h.4" in text


def test_megatron_ties_an_embedding_and_a_head_itself(tmp_path: Path) -> None:
    tied = decoder(3, tied=True)
    alone = arguments(tmp_path, problem(tied), grid(tied, [], replicas=2))
    assert (alone["--pipeline-model-parallel-size"], "--pipeline-model-parallel-layout" in alone) == ("1", False)
    options = megatron.TARGET.restrict(tied_decoder(5), Options(accumulate=8, stages=3))
    outcome = solve(problem(tied_decoder(5), options=options))
    assert "wte" in outcome.plan.stages[0].layers
    assert "lm_head" in outcome.plan.stages[2].layers
    for found in (alone, arguments(tmp_path, outcome.problem, outcome.plan)):
        assert "--untie-embeddings-and-output-weights" not in found


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the module for DeepSpeed with stand-ins for DeepSpeed's classes."""

    class Without:
        def __init__(self, *_: object, **__: object) -> None:
            raise AssertionError("this is not DeepSpeed")

    wanted = {
        "deepspeed": {},
        "deepspeed.pipe": {"LayerSpec": Without, "PipelineModule": Without},
        "deepspeed.runtime": {},
        "deepspeed.runtime.activation_checkpointing": {},
        "deepspeed.runtime.activation_checkpointing.checkpointing": {"non_reentrant_checkpoint": None},
        "deepspeed.runtime.pipe": {},
        "deepspeed.runtime.pipe.topology": {"PipeDataParallelTopology": Without},
    }
    for name, content in wanted.items():
        made = types.ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    def run(made_of: Problem, plan: Plan) -> dict[str, Any]:
        found: dict[str, Any] = {}
        text = export_files(deepspeed.TARGET, made_of, plan)[deepspeed.MODULE].text
        exec(compile(text, deepspeed.MODULE, "exec"), found)
        return found

    return run


def bundled(name: str) -> Profile:
    return Profile.load(resources.bundled_folder("profiles") / f"{name}-v100.json")


def test_a_chain_can_be_cut_between_all_of_its_layers_and_blocks_stay_whole() -> None:
    found = chain_of(bundled("vgg16"))
    features, classifier = [f"features.{n}" for n in range(31)], [f"classifier.{n}" for n in range(7)]
    assert [item.label for item in found] == features + classifier
    assert found[-1].layers == ("classifier.6", "loss"), "DeepSpeed computes the loss behind its last layer"
    assert [item.label for item in chain_of(decoder(2))] == ["wte", "h.0", "h.1", "ln_f", "lm_head"]
    assert [item.label for item in chain_of(bundled("gnmt8"))] == ["encoder.embedding", "decoder.classifier"]
    assert "word" in chain_of(bundled("s2vt"))[0].layers, "the words are read by the first stage too"
    rotary = decoder(3, rotary=True)
    assert {item.beside for item in chain_of(rotary)} == {(), ("rotary",)}
    text = export_files(deepspeed.TARGET, problem(rotary), grid(rotary, ["h.1.ln"]))[deepspeed.MODULE].text
    assert "# Later stages also read outputs that need no gradient: rotary." in text


def test_an_output_with_a_gradient_that_passes_every_cut_leaves_no_chain() -> None:
    plain = chain(["a", "b", "c", "d", "loss"])
    profile = replace(plain, tensors=(*plain.tensors, Tensor("far", "a", ("d", "loss"), 8, 8)))
    assert [item.layers for item in chain_of(profile)] == [("a",), ("b", "c", "d", "loss")]
    more = replace(profile, tensors=(*profile.tensors, Tensor("more", "a", ("c",), 8, 8)), together=(("a", "b"),))
    for refused, said in (
        (more, r"after b the outputs of (a and b|b and a) cross"),
        (replace(plain, together=(("a", "d"),)), "a and d must share a stage"),
    ):
        with pytest.raises(InputError, match=said):
            deepspeed.TARGET.restrict(refused, Options(accumulate=8))


def test_deepspeeds_module_cuts_a_list_where_the_plan_says(module: Any) -> None:
    plan = recomputing_first(grid(DECODER, ["h.1.ln", "ln_f"]))
    found = module(problem(DECODER), plan)
    assert (found["STAGES"], found["REPLICAS"], found["RECOMPUTE"]) == (3, 1, (True, False, False))
    cut = found["parts_of"]
    assert cut(["wte", "", "h.0", "h.1", "h.2", "h.3", "", "ln_f", "lm_head"]) == [0, 3, 7, 9]
    for names, said in (
        (["wte", "h.0", "h.1", "h.2", "h.3"], r"one called 'ln_f'"),
        (["wte", "ln_f", "h.1"], "in this order"),
        (["h.1", "ln_f"], "in this order"),
    ):
        with pytest.raises(ValueError, match=said):
            cut(names)
    config = json.loads(export_files(deepspeed.TARGET, problem(DECODER), plan)[deepspeed.CONFIG].text)
    assert config["pipeline"] == {"use_reentrant": False}
    plan = grid(DECODER, ["h.2.ln"], replicas=4, accumulate=12)
    files = export_files(deepspeed.TARGET, problem(DECODER, servers=2), plan)
    assert json.loads(files[deepspeed.CONFIG].text) == {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
    }
    hosts = [line for line in files[deepspeed.HOSTS].text.splitlines() if not line.startswith("#")]
    assert hosts == ["server0 slots=4", "server1 slots=4"]


def test_a_sequential_gives_its_layers_with_their_names(module: Any) -> None:
    inner = nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), inner, nn.Sequential(nn.Tanh()))
    profile = chain(["0", "1.0", "1.1", "1.2", "2.0", "loss"])
    tanh = replace(profile.layers[4], parameter_bytes=0)
    profile = replace(profile, layers=(*profile.layers[:4], tanh, profile.layers[5]))
    found = module(problem(profile), grid(profile, ["1.2"]))
    layers = found["layers_of"](model)
    assert [name for name, _ in layers] == ["0", "1.0", "1.1", "1.2", "2"]
    value = point = torch.ones(1, 2)
    for _, layer in layers:
        value = layer(value)
    assert torch.equal(value, model(point))
    assert found["parts_of"]([name for name, _ in layers]) == [0, 3, 5]


def two_lists() -> Profile:
    """A decoder whose blocks 4 and 5 are blocks 0 and 1 of a second list, as in Flux."""

    def new(name: str) -> str:
        return re.sub(r"^h\.([45])\b", lambda found: f"single.{int(found[1]) - 4}", name)

    layers = [replace(one, name=new(one.name), module=new(one.module)) for one in DECODER.layers]
    tensors = [
        replace(one, name=new(one.name), producer=new(one.producer), consumers=tuple(map(new, one.consumers)))
        for one in DECODER.tensors
    ]
    return replace(DECODER, layers=tuple(layers), tensors=tuple(tensors))


def diffusion(profile: Profile, plan: Plan) -> tuple[dict[str, Any], str]:
    text = export_files(diffusion_pipe.TARGET, problem(profile), plan)[diffusion_pipe.FILE].text
    return tomllib.loads(text), text


@pytest.mark.parametrize("profile", [DECODER, two_lists()], ids=["one list", "two lists"])
def test_diffusion_pipe_gets_the_items_of_every_stage(profile: Profile) -> None:
    """Its pipeline cuts the list of items at the places of `partition_split`."""
    starts = [layer.name for layer in profile.layers if layer.name.endswith(".ln")]
    items = ["initial", *(name.removesuffix(".ln") for name in starts), "final"]
    for cuts in ([starts[3]], [starts[1], starts[4]], [starts[0], "ln_f"], [starts[0], *starts[2:4]]):
        plan = grid(profile, cuts, accumulate=8)
        found, text = diffusion(profile, plan)
        assert (found["pipeline_stages"], found["partition_method"]) == (len(plan.stages), "manual")
        assert (found["micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (4, 8)
        assert found["activation_checkpointing"] is False
        bounds = [0, *found["partition_split"], len(items)]
        assert len(bounds) == len(plan.stages) + 1
        for number, stage in enumerate(plan.stages):
            own = items[bounds[number] : bounds[number + 1]]
            held = list(dict.fromkeys(name.rpartition(".")[0] for name in stage.layers if "." in name))
            assert [item for item in own if item not in ("initial", "final")] == held
            assert ("initial" in own, "final" in own) == ("wte" in stage.layers, "lm_head" in stage.layers)
        assert ("HunyuanVideo" in text) == (profile is not DECODER)
    found, text = diffusion(profile, recomputing_first(plan))
    assert (found["activation_checkpointing"], "slower than the prediction" in text) == (True, True)
    alone, _ = diffusion(profile, grid(profile, [], replicas=2))
    assert alone.keys().isdisjoint({"partition_method", "partition_split"})


def test_a_plan_for_unequal_cards_names_the_card_of_each_rank() -> None:
    """The small card comes first in the file, and the layers of the plan decide which rank it gets."""
    cards = [Device("small", "cuda", 2**30, speed=0.5), Device("big", "cuda", 2**30)]
    head_heavy = tuple(
        replace(layer, forward_s=layer.forward_s * (4 if layer.name in ("lm_head", "ln_f") else 1))
        for layer in DECODER.layers
    )
    for profile in (DECODER, replace(DECODER, layers=head_heavy)):
        cluster = Cluster.of_devices("box", cards, Level("server", 2, 10e9))
        found = pipeplan.solve(profile, cluster, batch=32, target="diffusion-pipe", stages=2)
        text = export_files(diffusion_pipe.TARGET, found.problem, found.plan)[diffusion_pipe.FILE].text
        for rank, device in enumerate(found.problem.cluster.devices):
            assert f"\n# stage {rank}, rank {rank} ({device.name}): " in text


TORCH, TITAN = export_target("torch-pipelining"), export_target("torchtitan")
CUTS = ["h.1.ln", "h.3.ln", "h.5.ln"]


def constants(files: Mapping[str, ExportFile], name: str = "pipeline.py") -> dict[str, Any]:
    """The top-level constants of a generated module. An attribute counts as its last name."""

    def plain(node: ast.expr) -> Any:
        if isinstance(node, ast.Attribute):
            return node.attr
        if isinstance(node, ast.Dict):
            return {plain(key): plain(one) for key, one in zip(node.keys, node.values, strict=True) if key}
        return ast.literal_eval(node)

    assigned: dict[str, Any] = {}
    for node in ast.parse(files[name].text).body:
        if isinstance(node, ast.Assign):
            names = [one.id for part in node.targets for one in ast.walk(part) if isinstance(one, ast.Name)]
            try:
                value = plain(node.value)
            except ValueError:
                continue  # not a literal
            assigned |= dict(zip(names, value if len(names) > 1 else [value], strict=True))
    return assigned


def rows_of(files: Mapping[str, ExportFile]) -> list[list[str]]:
    return [row.split(",") for row in files["schedule.csv"].text.splitlines()]


def test_stages_ranks_and_sizes() -> None:
    plan = grid(DECODER, ["h.1.ln", "h.3.ln"], replicas=2, accumulate=12)
    found = constants(export_files(TORCH, problem(DECODER, 2), plan))
    assert found["SPLIT_SPEC"] == {"h.1": "BEGINNING", "h.3": "BEGINNING"}
    assert found["RANKS"] == [[0, 1], [2, 3], [4, 5]]
    assert (found["STAGES"], found["REPLICAS"]) == (3, 2)
    assert (found["MICROBATCH"], found["MICROBATCHES"]) == (4, 6)
    assert (found["SCHEDULE"], found["BY_ORDER"]) == ("1F1B", False)
    half = grid(DECODER, ["h.2.ln"], replicas=2)
    stages = (replace(half.stages[0], workers=(0, 2)), replace(half.stages[1], workers=(1, 3)))
    copies = constants(export_files(TORCH, problem(DECODER), replace(half, stages=stages, copies=2)))
    assert copies["RANKS"] == [[0, 2], [1, 3]], "copies of a pipeline are replicas"
    profile = chain(["conv", "relu", "fc", "loss"])
    relu = replace(profile.layers[1], module="", op="relu")
    profile = replace(profile, layers=(profile.layers[0], relu, *profile.layers[2:]))
    found = constants(export_files(TORCH, problem(profile), grid(profile, ["relu"])))
    assert found["SPLIT_SPEC"] == {"conv": "END"}, "an operator follows"


def test_the_order_has_every_pass_once_and_as_many_in_flight_as_planned() -> None:
    each = 6
    for schedule, replicas, depths in ((GPIPE, 2, (6, 6, 6)), (FLUSH, 1, (5, 2, 1)), (FLUSH, 2, (3, 2, 1))):
        plan = grid(DECODER, ["h.1.ln", "h.2.ln"], replicas, each * replicas, schedule=schedule)
        stages = tuple(replace(stage, depth=depth) for stage, depth in zip(plan.stages, depths, strict=True))
        files = export_files(TORCH, problem(DECODER, 2), replace(plan, stages=stages))
        for number, (row, depth) in enumerate(zip(rows_of(files), depths, strict=True)):
            for kind in "FB":
                assert [one for one in row if one[1] == kind] == [f"{number}{kind}{one}" for one in range(each)]
            balance = list(itertools.accumulate(1 if one[1] == "F" else -1 for one in row))
            assert (len(row), max(balance), min(balance)) == (2 * each, depth, 0)
        found = constants(files)
        assert found["SCHEDULE"] == {GPIPE: "GPipe", FLUSH: "1F1B"}[schedule]
        assert found["BY_ORDER"] == (depths == (5, 2, 1)), "torch's own 1F1B has 3, 2, 1 in flight"


def test_fewer_microbatches_than_stages_go_by_the_plans_order() -> None:
    """torch's own 1F1B refuses such an update."""
    for each, schedule in ((2, FLUSH), (3, FLUSH), (2, GPIPE)):
        plan = grid(DECODER, ["h.1.ln", "h.2.ln"], 2, each * 2, schedule=schedule)
        plan = replace(plan, stages=tuple(replace(one, depth=min(one.depth, each)) for one in plan.stages))
        few = schedule == FLUSH and each < 3
        files = export_files(TORCH, problem(DECODER, 2), plan)
        assert constants(files)["BY_ORDER"] is few
        assert ("torch's schedule needs at least as many microbatches as stages" in files["pipeline.py"].text) is few
        assert ("schedule.csv" in export_files(TITAN, problem(DECODER, 2), plan)) is few
    assert files["schedule.csv"].text.splitlines()[0] == "0F0,0F1,0B0,0B1"


def test_torchtitan_gets_stages_batch_sizes_and_the_name_of_the_schedule() -> None:
    rotary = decoder(6, rotary=True)  # torchtitan computes the rotary embedding in every stage
    files = export_files(TITAN, problem(rotary, 2), grid(rotary, ["h.0.ln", "h.4.ln"], replicas=2, accumulate=6))
    found = constants(files, "plan_config.py")
    assert found["STAGES"] == [
        ["tok_embeddings"],
        [f"layers.{index}" for index in range(4)],
        ["layers.4", "layers.5", "norm", "lm_head"],
    ]
    assert found["BLOCKS"] == 6
    assert "local_batch_size=12,\n        global_batch_size=24," in files["plan_config.py"].text
    assert list(files) == ["plan_config.py"], "torch's own 1F1B has the plan's order"
    for schedule, name in (("interleaved-1f1b", "Interleaved1F1B"), ("zb-v", "ZBVZeroBubble")):
        files = export_files(TITAN, problem(DECODER), folded(DECODER, CUTS, schedule, 4))
        stages = constants(files, "plan_config.py")["STAGES"]
        assert (stages[0], stages[-1]) == (["tok_embeddings", "layers.0"], ["layers.5", "norm", "lm_head"])
        text = files["plan_config.py"].text
        assert (len(stages), "pipeline_parallel_degree=2," in text) == (4, True)
        assert f'pipeline_parallel_schedule="{name}",' in text
        assert 'pipeline_parallel_schedule_csv=""' in text


def theirs(kind: str, devices: int, chunks: int, minibatches: int, device: int) -> list[tuple[str, int, int]]:
    """The computations of one rank by torch, as (kind, stage, minibatch)."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule: Any = object.__new__(getattr(schedules, kind))
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = devices, chunks, minibatches
    schedule._num_stages = schedule.num_stages = devices * chunks
    schedule.number_of_rounds = max(1, minibatches // devices)
    schedule.microbatches_per_round = minibatches // schedule.number_of_rounds
    actions = [one for one in schedule._calculate_single_rank_operations(device) if one is not None]
    parts = [re.fullmatch(r"(\d+)([FBIW])(\d+)", str(one)) for one in actions]
    return [(one[2].replace("I", "B"), int(one[1]), int(one[3])) for one in parts if one is not None]


def test_interleaved_1f1b_and_zb_v_are_in_the_order_of_torch() -> None:
    for devices, chunks, rounds in itertools.product((1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 5)):
        for device in range(devices):
            stages = [stage for stage in range(devices * chunks) if looped_device(stage, devices) == device]
            ours = interleaved_passes(device, devices, chunks, rounds * devices)
            found = [(kind, stages[chunk], minibatch) for kind, chunk, minibatch in ours]
            assert found == theirs("ScheduleInterleaved1F1B", devices, chunks, rounds * devices, device)
    for devices in (1, 2, 3, 4, 8):
        for minibatches, device in itertools.product((1, 2, devices, 3 * devices + 1), range(devices)):
            stages = [stage for stage in range(2 * devices) if v_shaped_device(stage, devices) == device]
            ours = zero_bubble_v_passes(device, devices, 2, minibatches)
            found = [(kind, stages[chunk], minibatch) for kind, chunk, minibatch in ours]
            assert found == theirs("ScheduleZBVZeroBubble", devices, 2, minibatches, device)


def test_torch_reads_the_order_of_inputs_and_weights() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [Stage(("a",), (0,), 2, 1), Stage(("b",), (1,), 1, 1, deferred=1)]
    plan = Plan(tuple(stages), schedule="zb-h1", accumulate=3)
    rows = [row.split(",") for row in order_csv(plan).split()]
    assert rows == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["1F0", "1I0", "1F1", "1I1", "1W0", "1F2", "1I2", "1W1", "1W2"],
    ]
    for row in rows:
        assert [str(schedules._Action.from_str(one)) for one in row] == row
    whole = replace(plan, stages=tuple(replace(stage, deferred=0) for stage in stages))
    assert not set(order_csv(whole)) & {"I", "W"}


def test_torch_gets_two_stages_for_each_place_and_the_order_where_it_has_another_one() -> None:
    for schedule, accumulate in (("zb-v", 5), ("interleaved-1f1b", 4), ("interleaved-1f1b", 5)):
        files = export_files(TORCH, problem(DECODER), folded(DECODER, CUTS, schedule, accumulate))
        found = constants(files)
        placed = [[0, 3], [1, 2]] if schedule == "zb-v" else [[0, 2], [1, 3]]
        by_order = (schedule, accumulate) == ("interleaved-1f1b", 5)
        assert (found["BY_ORDER"], found["PLACES"], found["STAGES"]) == (by_order, placed, 4)
        kinds = "FIW" if schedule == "zb-v" else "FB"
        for own, row in zip(placed, rows_of(files), strict=True):
            passes = itertools.product(own, kinds, range(accumulate))
            assert sorted(row) == sorted(f"{stage}{kind}{one}" for stage, kind, one in passes)

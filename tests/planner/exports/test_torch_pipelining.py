"""The files for torch.distributed.pipelining and torchtitan, whose orders of passes are those of torch's schedules."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from decoders import chain, decoder, folded, grid, problem

from pipeplan.exports.target import ExportFile, export_files, export_target
from pipeplan.exports.uniform_degrees import order_csv
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import FLUSH, GPIPE
from pipeplan_launch.plan.virtual_stages import interleaved_passes, looped_device, v_shaped_device, zero_bubble_v_passes

TORCH, TITAN = export_target("torch-pipelining"), export_target("torchtitan")
DECODER = decoder(6)
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

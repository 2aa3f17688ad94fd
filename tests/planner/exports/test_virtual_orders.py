"""Orders of passes that exports write are those of torch's own schedules, which they name."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from decoders import decoder, folded, problem

from pipeplan.errors import InputError
from pipeplan.exports import deepspeed, megatron, torch_pipelining, torchtitan
from pipeplan.exports.uniform_degrees import order_csv
from pipeplan.plan.plan import Plan, Stage
from pipeplan_launch.plan.virtual_stages import interleaved_passes, looped_device, v_shaped_device, zero_bubble_v_passes

INTERLEAVED = "interleaved-1f1b"
CUTS = ["h.1.ln", "h.3.ln", "h.5.ln"]


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


@pytest.mark.parametrize(("schedule", "name"), [("interleaved-1f1b", "Interleaved1F1B"), ("zb-v", "ZBVZeroBubble")])
def test_torchtitan_gets_the_stages_and_the_name_of_the_schedule(schedule: str, name: str) -> None:
    profile = decoder(6)
    plan = folded(profile, CUTS, schedule, 4)
    (text,) = (file.text for file in torchtitan.TARGET.files(problem(profile), plan).values())
    names: dict[str, Any] = {}
    body = text[text.index("STAGES = [") : text.index("def plan()")]
    exec(body, names)
    assert names["STAGES"][0] == ["tok_embeddings", "layers.0"]
    assert names["STAGES"][-1] == ["layers.5", "norm", "lm_head"]
    assert len(names["STAGES"]) == 4
    assert "pipeline_parallel_degree=2," in text
    assert f"pipeline_parallel_schedule={name!r}," in text.replace('"', "'")
    assert 'pipeline_parallel_schedule_csv=""' in text


def test_torch_gets_two_stages_for_each_place_and_the_order_where_it_has_another_one() -> None:
    profile = decoder(6)
    for schedule, accumulate, by_order in (("zb-v", 5, False), ("interleaved-1f1b", 4, False), (INTERLEAVED, 5, True)):
        plan = folded(profile, CUTS, schedule, accumulate)
        files = torch_pipelining.TARGET.files(problem(profile), plan)
        text = files["pipeline.py"].text
        assert f"BY_ORDER = {by_order}" in text
        assert "STAGES, REPLICAS = 4, 1" in text
        placed = [[0, 3], [1, 2]] if schedule == "zb-v" else [[0, 2], [1, 3]]
        assert f"PLACES = [\n    {placed[0]},\n    {placed[1]},\n]" in text
        rows = [row.split(",") for row in files["schedule.csv"].text.splitlines()]
        kinds = "FIW" if schedule == "zb-v" else "FB"
        for own, row in zip(placed, rows, strict=True):
            assert sorted(row) == sorted(
                f"{stage}{kind}{one}" for stage in own for kind in kinds for one in range(accumulate)
            )


def test_megatron_gets_a_layout_whose_stages_go_round_the_ranks() -> None:
    profile = decoder(6)
    plan = folded(profile, CUTS, INTERLEAVED, 8, replicas=2)
    text = megatron.TARGET.files(problem(profile, 2), plan)[megatron.FILE].text
    assert "--pipeline-model-parallel-size 2" in text
    assert "--pipeline-model-parallel-layout 'Et|t*2|t*2|tL'" in text
    assert "# stage 2, ranks 0-1: h.3 to h.4" in text
    assert "Microbatches in flight" not in text


def test_targets_that_cannot_refuse_in_one_line() -> None:
    profile = decoder(6)
    odd = folded(profile, CUTS, INTERLEAVED, 5)
    for target in (torchtitan.TARGET, megatron.TARGET):
        with pytest.raises(InputError, match="needs a multiple of 2 microbatches, not 5"):
            target.refuse(problem(profile), odd)
    bent = folded(profile, CUTS, "zb-v", 4)
    with pytest.raises(InputError, match="it has no schedule zb-v"):
        megatron.TARGET.refuse(problem(profile), bent)
    with pytest.raises(InputError, match="run several stages each"):
        deepspeed.TARGET.refuse(problem(profile), odd)
    recomputing = replace(bent, stages=tuple(replace(stage, recompute=True) for stage in bent.stages))
    with pytest.raises(InputError, match="whose backward pass torch cannot divide"):
        torch_pipelining.TARGET.refuse(problem(profile), recomputing)

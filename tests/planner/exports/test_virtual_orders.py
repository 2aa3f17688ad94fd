"""Orders of passes with several stages on a worker are those of torch's own schedules, which exports name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from decoders import decoder, problem

from pipeplan.cost.virtual_stages import with_depths
from pipeplan.errors import InputError
from pipeplan.exports import megatron, torch_pipelining, torchtitan
from pipeplan.plan.plan import Plan, Stage
from pipeplan.profile_data.profile import Profile
from pipeplan_launch.plan.virtual_stages import interleaved_passes, looped_device, v_shaped_device, zero_bubble_v_passes


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


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_interleaved_1f1b_is_in_the_order_of_torch(devices: int) -> None:
    for chunks in (1, 2, 3):
        for rounds in (1, 2, 5):
            for device in range(devices):
                stages = [stage for stage in range(devices * chunks) if looped_device(stage, devices) == device]
                ours = interleaved_passes(device, devices, chunks, rounds * devices)
                found = [(kind, stages[chunk], minibatch) for kind, chunk, minibatch in ours]
                assert found == theirs("ScheduleInterleaved1F1B", devices, chunks, rounds * devices, device)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_zb_v_is_in_the_order_of_torch(devices: int) -> None:
    for minibatches in (1, 2, devices, 2 * devices - 1, 3 * devices + 1):
        for device in range(devices):
            stages = [stage for stage in range(2 * devices) if v_shaped_device(stage, devices) == device]
            ours = zero_bubble_v_passes(device, devices, 2, minibatches)
            found = [(kind, stages[chunk], minibatch) for kind, chunk, minibatch in ours]
            assert found == theirs("ScheduleZBVZeroBubble", devices, 2, minibatches, device)


def virtual_plan(profile: Profile, cuts: Sequence[str], schedule: str, accumulate: int) -> Plan:
    """Four stages on two workers."""
    names = [layer.name for layer in profile.layers]
    ends = [0, *(names.index(cut) for cut in cuts), len(names)]
    placed = {"interleaved-1f1b": (0, 1, 0, 1), "zb-v": (0, 1, 1, 0)}[schedule]
    stages = [Stage(tuple(names[a:b]), (worker,), 1, 1) for (a, b), worker in zip(pairwise(ends), placed, strict=True)]
    return with_depths(Plan(tuple(stages), schedule=schedule, accumulate=accumulate))


@pytest.mark.parametrize(("schedule", "name"), [("interleaved-1f1b", "Interleaved1F1B"), ("zb-v", "ZBVZeroBubble")])
def test_torchtitan_gets_the_stages_and_the_name_of_the_schedule(schedule: str, name: str) -> None:
    profile = decoder(6)
    plan = virtual_plan(profile, ["h.1.ln", "h.3.ln", "h.5.ln"], schedule, 4)
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


def test_targets_that_cannot_refuse_in_one_line() -> None:
    profile = decoder(6)
    odd = virtual_plan(profile, ["h.1.ln", "h.3.ln", "h.5.ln"], "interleaved-1f1b", 5)
    with pytest.raises(InputError, match="needs a multiple of 2 microbatches, not 5"):
        torchtitan.TARGET.refuse(problem(profile), odd)
    for target in (torch_pipelining.TARGET, megatron.TARGET):
        with pytest.raises(InputError, match="run several stages each"):
            target.refuse(problem(profile), odd)

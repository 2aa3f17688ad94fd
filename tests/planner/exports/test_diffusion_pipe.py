"""The export to diffusion-pipe: the division of its list of items, and what it refuses."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from decoders import chain, decoder, grid, problem, refusal

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.exports.diffusion_pipe import FILE, TARGET
from pipeplan.exports.target import export_files
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import GPIPE
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile

DECODER = decoder(6)


def two_lists() -> Profile:
    """A decoder whose blocks 4 and 5 are blocks 0 and 1 of a second list, as in Flux."""
    renamed = {f"h.{n}.{part}": f"single.{n - 4}.{part}" for n in (4, 5) for part in ("ln", "attn", "add")}

    def new(name: str) -> str:
        return renamed.get(name, name)

    layers = tuple(
        replace(layer, name=new(layer.name), module=new(layer.name).removesuffix(".add"))
        if layer.name in renamed
        else layer
        for layer in DECODER.layers
    )
    tensors = tuple(
        replace(one, name=new(one.name), producer=new(one.producer), consumers=tuple(map(new, one.consumers)))
        for one in DECODER.tensors
    )
    return replace(DECODER, layers=layers, tensors=tensors)


def divided(items: list[str], split: list[int], stages: int) -> list[list[str]]:
    """The items of each stage, as diffusion-pipe's own pipeline takes `partition_split`."""
    bounds = [0, *split, len(items)]
    assert len(split) == stages - 1
    return [items[bounds[stage] : bounds[stage + 1]] for stage in range(stages)]


@pytest.mark.parametrize("profile", [DECODER, two_lists()], ids=["one list", "two lists"])
def test_the_items_of_every_stage_hold_its_layers(profile: Profile) -> None:
    names = [layer.name for layer in profile.layers]
    starts = [name for name in names if name.endswith(".ln")]
    items = ["initial", *(name.removesuffix(".ln") for name in starts), "final"]
    for cuts in ([starts[3]], [starts[1], starts[4]], [starts[0], "ln_f"], [starts[0], *starts[2:4]]):
        plan = grid(profile, cuts, accumulate=8)
        text = export_files(TARGET, problem(profile), plan)[FILE].text
        found = tomllib.loads(text)
        assert (found["pipeline_stages"], found["partition_method"]) == (len(plan.stages), "manual")
        assert (found["micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (4, 8)
        assert found["activation_checkpointing"] is False
        for own, stage in zip(divided(items, found["partition_split"], len(plan.stages)), plan.stages, strict=True):
            blocks = [item for item in own if item not in ("initial", "final")]
            held = list(dict.fromkeys(name.rpartition(".")[0] for name in stage.layers if "." in name))
            assert blocks == held
            assert ("initial" in own, "final" in own) == ("wte" in stage.layers, "lm_head" in stage.layers)
        assert ("HunyuanVideo" in text) == (profile is not DECODER)


def test_recomputation_is_for_all_stages() -> None:
    plan = grid(DECODER, ["h.3.ln"])
    again = replace(plan, stages=(replace(plan.stages[0], recompute=True), plan.stages[1]))
    text = export_files(TARGET, problem(DECODER), again)[FILE].text
    assert tomllib.loads(text)["activation_checkpointing"] is True
    assert "slower than the prediction" in text
    one = export_files(TARGET, problem(DECODER), grid(DECODER, [], replicas=2))[FILE].text
    assert tomllib.loads(one).keys().isdisjoint({"partition_method", "partition_split"})


def test_what_diffusion_pipe_cannot_do_is_refused() -> None:
    made, plan = problem(DECODER), grid(DECODER, ["h.3.ln"])
    unequal = grid(DECODER, [], replicas=2)
    unequal = replace(unequal, stages=(replace(unequal.stages[0], shares=(5, 3)),))
    zero = replace(made, options=Options(sharding=Sharding.OPTIMIZER))
    refused: list[tuple[Problem, Plan]] = [
        (made, grid(DECODER, ["h.3.attn"])),
        (made, replace(plan, schedule=GPIPE)),
        (made, unequal),
        (zero, plan),
    ]
    for one in refused:
        refusal(TARGET, *one)
    with pytest.raises(InputError, match="lists of equal blocks"):
        TARGET.restrict(chain(["a", "b", "loss"]), Options(accumulate=8))


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
        lines = export_files(TARGET, found.problem, found.plan)[FILE].text.splitlines()
        for rank, device in enumerate(found.problem.cluster.devices):
            assert any(line.startswith(f"# stage {rank}, rank {rank} ({device.name}): ") for line in lines)

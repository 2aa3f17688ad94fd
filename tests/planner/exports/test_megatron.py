"""The export to Megatron-LM: the models and plans that it accepts, and its layout, read by a separate parser."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from decoders import chain, decoder, grid, problem, refusal, tied_decoder

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.exports.deepspeed import MODULE
from pipeplan.exports.deepspeed import TARGET as DEEPSPEED
from pipeplan.exports.megatron import FILE, TARGET
from pipeplan.exports.module_stacks import stack_of
from pipeplan.exports.target import ExportTarget, export_files
from pipeplan.exports.torch_pipelining import TARGET as TORCH
from pipeplan.exports.torchtitan import TARGET as TORCHTITAN
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import GPIPE, STASHING
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files

DECODER = decoder(6)


def expanded(layout: str) -> list[str]:
    """The stages of a layout with one letter for each layer: `Et*2|L` has the stages `Ett` and `L`."""
    return re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), layout).split("|")


def arguments(folder: Path, made_of: Problem, plan: Plan) -> dict[str, str]:
    """The arguments and variables that bash reads from the fragment, by name."""
    text = export_files(TARGET, made_of, plan)[FILE].text
    (folder / FILE).write_text(text)
    script = (
        f"set -eu; source ./{FILE}; printf '%s\\0' \"${{PIPEPLAN_ARGS[@]}}\"; printf '%s\\0' nodes \"$PIPEPLAN_NNODES\""
    )
    script += ' per-node "$PIPEPLAN_NPROC_PER_NODE" world "$PIPEPLAN_WORLD_SIZE"'
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    values, name = {}, ""
    for word in words:
        if word.startswith("--") or word in ("nodes", "per-node", "world"):
            name, values[word] = word, ""
        else:
            values[name] = word
    return values


def test_the_layout_has_the_blocks_of_every_stage(tmp_path: Path) -> None:
    for cuts, stages in (
        (["h.3.ln"], ["Ettt", "tttL"]),
        (["h.0.ln", "h.5.ln", "ln_f"], ["E", "ttttt", "t", "L"]),
        (["h.1.ln", "h.2.ln"], ["Et", "t", "ttttL"]),
    ):
        found = arguments(tmp_path, problem(DECODER), grid(DECODER, cuts, accumulate=8))
        assert expanded(found["--pipeline-model-parallel-layout"]) == stages
        assert found["--pipeline-model-parallel-size"] == str(len(stages))
        assert found["--num-layers"] == "6"
        assert found["--tensor-model-parallel-size"] == "1"
        assert "--untie-embeddings-and-output-weights" in found


def test_sizes_are_those_of_the_grid(tmp_path: Path) -> None:
    plan = grid(DECODER, ["h.3.ln"], replicas=4, accumulate=12)
    found = arguments(tmp_path, problem(DECODER, servers=2), plan)
    assert (found["--micro-batch-size"], found["--global-batch-size"]) == ("4", "48")
    assert (found["nodes"], found["per-node"], found["world"]) == ("2", "4", "8")


def test_plain_data_parallelism_needs_no_layout_and_may_tie(tmp_path: Path) -> None:
    tied = decoder(3, tied=True)
    found = arguments(tmp_path, problem(tied), grid(tied, [], replicas=2))
    assert found["--pipeline-model-parallel-size"] == "1"
    assert "--pipeline-model-parallel-layout" not in found
    assert "--untie-embeddings-and-output-weights" not in found


def test_an_embedding_and_a_head_that_share_a_weight_are_tied_by_megatron_itself(tmp_path: Path) -> None:
    profile = tied_decoder(5)
    options = TARGET.restrict(profile, Options(accumulate=8, stages=3))
    outcome = solve(problem(profile, options=options))
    assert {"wte"} <= {*outcome.plan.stages[0].layers}
    assert {"lm_head"} <= {*outcome.plan.stages[2].layers}
    found = arguments(tmp_path, outcome.problem, outcome.plan)
    assert found["--pipeline-model-parallel-size"] == "3"
    assert "--untie-embeddings-and-output-weights" not in found


def test_other_weights_that_stages_share_are_refused_by_name() -> None:
    profile = tied_decoder(5, "h.0.attn", "h.4.attn")
    plan = grid(profile, ["h.1.ln"])
    for target in (TARGET, DEEPSPEED, TORCH, TORCHTITAN):
        with pytest.raises(
            InputError, match=r"stages 1 and 2 share wte\.weight .* whose gradients this export does not"
        ):
            export_files(target, problem(profile), plan)
    for target in (DEEPSPEED, TORCH, TORCHTITAN):
        with pytest.raises(InputError, match=r"stages 1 and 2 share wte\.weight|wte and lm_head share their weights"):
            export_files(target, problem(tied_decoder(5)), plan)
    outcome = solve(problem(profile, options=TARGET.restrict(profile, Options(accumulate=8))))
    assert "h.4.attn" in next(stage for stage in outcome.plan.stages if "h.0.attn" in stage.layers).layers
    assert FILE in export_files(TARGET, outcome.problem, outcome.plan)


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
def test_every_plan_under_the_restriction_can_be_expressed(rotary: bool) -> None:
    profile = decoder(5, rotary=rotary)
    for stages in (2, 4):
        options = TARGET.restrict(profile, Options(accumulate=8, stages=stages))
        made_of = problem(profile, options=options)
        assert {unit.layers[0] for unit in made_of.units} == {"wte", "ln_f", *(f"h.{n}.ln" for n in range(5))}
        outcome = solve(made_of)
        assert FILE in export_files(TARGET, outcome.problem, outcome.plan)
        assert len(outcome.plan.stages) == stages


@pytest.mark.parametrize("target", [TARGET, DEEPSPEED], ids=lambda target: target.name)
def test_another_number_of_microbatches_in_flight_is_reported(target: ExportTarget) -> None:
    file = FILE if target is TARGET else MODULE
    plan = grid(DECODER, ["h.3.ln"], accumulate=80)
    deeper = replace(plan, stages=(replace(plan.stages[0], depth=4), plan.stages[1]))
    difference = "in flight: 2-1, where the plan counts on 4-1; "
    assert "in flight" not in export_files(target, problem(DECODER), plan)[file].text
    assert f"{difference}this may be slower" in export_files(target, problem(DECODER), deeper)[file].text
    levels = (Level("server", 1, 1e9), Level("cluster", 2, 1e9, latency_s=9e-3))
    slow = Problem(DECODER, Cluster("slow", Device("A100", "cuda", 2**30), levels))
    # 22 layers take 3 ms each, and each direction 9 ms: a microbatch takes 84 ms, and two are in flight.
    assert f"{difference}so each takes 42 ms or more, not " in export_files(target, slow, deeper)[file].text


def test_plans_that_megatron_cannot_express_are_refused() -> None:
    two, scattered = grid(DECODER, ["h.3.ln"]), grid(DECODER, ["h.3.ln"], replicas=2)
    wide = (replace(two.stages[0], workers=(0, 1, 2)), replace(two.stages[1], workers=(3,)))
    again = (replace(two.stages[0], recompute=True), two.stages[1])
    apart = [replace(stage, workers=found) for stage, found in zip(scattered.stages, [(0, 2), (1, 3)], strict=True)]
    for plan, reason in (
        (grid(DECODER, ["h.3.attn"]), r"stage 1 holds a part of h\.3 only.*solve … --for megatron"),
        (grid(DECODER, ["lm_head"]), "stage 1 holds a part of the head only"),
        (grid(DECODER, ["h.3.ln"], schedule=STASHING, accumulate=None), "asynchronous.*--for megatron --batch"),
        (grid(DECODER, ["h.3.ln"], schedule=GPIPE), "has no schedule gpipe"),
        (grid(DECODER, ["h.3.ln"], replicas=2, accumulate=7), "7 minibatches"),
        (grid(DECODER, ["h.3.ln"], inference=True, schedule=STASHING, accumulate=None), "inference"),
        (replace(two, stages=wide), "stage 1 has 3 workers and stage 2 has 1"),
        (replace(two, stages=again), "stage 1 recomputes"),
        (replace(scattered, stages=tuple(apart)), "neighbours"),
    ):
        assert re.search(reason, refusal(TARGET, problem(DECODER), plan))


def test_models_that_are_no_stack_are_refused_with_the_reason() -> None:
    reason = r"cannot train this model: .* no list of blocks that are all alike.*between an embedding and a head: "
    for name in ("vgg16", "resnet50", "gnmt8", "awd-lm", "s2vt", "mnist"):
        profile = Profile.load(files.bundled_folder("profiles") / f"{name}-v100.json")
        with pytest.raises(InputError, match=reason):
            TARGET.restrict(profile, Options(accumulate=8))
        plan = grid(profile, [], schedule=STASHING, accumulate=None)
        assert re.search(reason, refusal(TARGET, problem(profile), plan))


def test_options_that_megatron_cannot_follow_are_refused() -> None:
    with pytest.raises(InputError, match=r"wte and lm_head share their weights"):
        TARGET.restrict(decoder(3, tied=True), Options(accumulate=8))
    with pytest.raises(InputError, match="--batch"):
        TARGET.restrict(DECODER, Options())
    with pytest.raises(InputError, match="no schedule gpipe"):
        TARGET.restrict(DECODER, Options(schedule=GPIPE, accumulate=8))


def test_nested_lists_are_flattened_but_not_the_lists_inside_blocks() -> None:
    paths = ["0.emb", *(f"1.{n}.{part}" for n in range(3) for part in ("norm", "experts.0", "experts.1")), "2", "loss"]
    stack = stack_of(chain(paths))
    assert stack.path == "1"
    assert [len(block) for block in stack.blocks] == [3, 3, 3]
    assert (stack.before, stack.after) == (("0.emb",), ("2", "loss"))


def test_two_lists_or_a_shortcut_past_a_block_make_no_stack() -> None:
    both = ["emb", *(f"{side}.{n}" for side in ("encoder", "decoder") for n in range(3)), "head", "loss"]
    with pytest.raises(InputError, match="encoder has 3; decoder has 3"):
        stack_of(chain(both))
    tensors = (*DECODER.tensors, Tensor("far", "h.0.add", ("h.3.ln",), 8, 8))
    with pytest.raises(InputError, match=r"h\.0\.add is read after the next block"):
        stack_of(replace(DECODER, tensors=tensors))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_fragment_is_safe_whatever_names_contain(tmp_path: Path) -> None:
    evil = "a'; touch broken #`touch broken`$(touch broken)\n\"\\"
    layers = tuple(
        Layer(evil if one.name == "ln_f" else one.name, *(1e-3, 2e-3, one.parameter_bytes, 64), module=one.module)
        for one in DECODER.layers
    )
    renamed = [
        replace(
            tensor,
            producer=evil if tensor.producer == "ln_f" else tensor.producer,
            consumers=tuple(evil if name == "ln_f" else name for name in tensor.consumers),
        )
        for tensor in DECODER.tensors
    ]
    profile = replace(DECODER, layers=layers, tensors=tuple(renamed), model_name=evil)
    assert arguments(tmp_path, problem(profile), grid(profile, ["h.3.ln"]))["--num-layers"] == "6"
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    done = subprocess.run(["shellcheck", "-s", "bash", FILE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

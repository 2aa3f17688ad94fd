"""What holds for every trainer: plans under its restriction are expressed, others are refused, names are harmless."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from decoders import chain, decoder, folded, grid, problem, refusal, tied_decoder

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.exports import deepspeed, megatron
from pipeplan.exports.module_stacks import stack_of
from pipeplan.exports.target import ExportTarget, export_files, export_target, python_literal
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import DOUBLE_BUFFERED, FLUSH, GPIPE, STASHING
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files

TORCH, TITAN, DEEPSPEED = map(export_target, ("torch-pipelining", "torchtitan", "deepspeed"))
MEGATRON, DIFFUSION = map(export_target, ("megatron", "diffusion-pipe"))
ALL = (TORCH, TITAN, DEEPSPEED, MEGATRON, DIFFUSION)
OF_BLOCKS = (TITAN, DEEPSPEED, MEGATRON, DIFFUSION)
DECODER = decoder(4)
NASTY = "'\"'''\"\"\"\\ #{{ x }} {% y %}\n$(touch broken)`touch broken` \u2028\U0001f600"


def bundled(name: str) -> Profile:
    return Profile.load(files.bundled_folder("profiles") / f"{name}-v100.json")


def test_every_plan_under_the_restriction_is_expressed() -> None:
    cases = [(target, decoder(5)) for target in ALL]
    cases += [(target, decoder(5, rotary=True)) for target in (TITAN, DEEPSPEED, MEGATRON)]
    cases += [(TORCH, bundled(name)) for name in ("mnist", "alexnet", "resnet50")]
    cases += [(DEEPSPEED, chain(["a", "b", "c", "d", "loss"]))]
    for target, profile in cases:
        for stages in (1, 2, 4):
            options = target.restrict(profile, Options(accumulate=8, stages=stages, memory=False))
            posed = problem(profile, options=options)
            plan = solve(posed, Settings(solver="dp", certify=False, simulate=False)).plan
            assert len(plan.stages) == stages
            assert export_files(target, posed, plan)
    made = problem(decoder(5), options=MEGATRON.restrict(decoder(5), Options(accumulate=8)))
    assert {unit.layers[0] for unit in made.units} == {"wte", "ln_f", *(f"h.{n}.ln" for n in range(5))}
    asked = Options(accumulate=4, schedule=GPIPE, together=(("wte", "h.0.ln"),), max_stages=3)
    found = TORCH.restrict(DECODER, asked)
    assert (found.schedule, found.accumulate, found.max_stages, found.grid) == (GPIPE, 4, 3, True)
    assert found.together[0] == ("wte", "h.0.ln"), "what the user asked for is kept"


def two(**fields: object) -> Plan:
    return grid(DECODER, ["h.2.ln"], **fields)  # type: ignore[arg-type]


def placed(*workers: tuple[int, ...], **fields: object) -> Plan:
    plan = two(**fields)
    return replace(plan, stages=tuple(replace(one, workers=w) for one, w in zip(plan.stages, workers, strict=True)))


def recomputing(plan: Plan, *stages: int) -> Plan:
    return replace(plan, stages=tuple(replace(one, recompute=n in stages) for n, one in enumerate(plan.stages)))


def shuffled() -> Plan:
    """A plan with the second block before the first, which is not the order of forward()."""
    names = [layer.name for layer in DECODER.layers]
    first = [name for name in names if not name.startswith(("h.0", "h.2", "h.3", "l"))]
    rest = [name for name in names if name not in first]
    return Plan((Stage(tuple(first), (0,), 2, 1), Stage(tuple(rest), (1,), 1, 1)), schedule=FLUSH, accumulate=4)


def unequal_shares() -> Plan:
    alone = grid(DECODER, [], replicas=2)
    return replace(alone, stages=(replace(alone.stages[0], shares=(5, 3)),))


CUTS = ["h.1.ln", "h.2.ln", "h.3.ln"]
ROUND = folded(DECODER, CUTS, "interleaved-1f1b", 5)
BENT = folded(DECODER, CUTS, "zb-v", 4)
REFUSED: tuple[tuple[tuple[ExportTarget, ...], Plan, str], ...] = (
    (ALL, two(schedule=STASHING, accumulate=None), "schedule 1f1b-stashing is asynchronous"),
    (ALL, two(schedule=DOUBLE_BUFFERED), "its schedule 2bw is asynchronous"),
    (ALL, two(replicas=2, accumulate=7), "7 minibatches of an update are not the same number"),
    (ALL, placed((0, 1, 2), (3,), accumulate=3), "stage 1 has 3 workers and stage 2 has 1"),
    (ALL, placed((0,), (3,)), "worker 1 has nothing to do"),
    ((MEGATRON, DEEPSPEED, DIFFUSION), two(schedule=GPIPE), "has no schedule gpipe"),
    ((TITAN, MEGATRON), placed((0, 2), (1, 3), replicas=2), "neighbours"),
    ((TITAN,), recomputing(grid(DECODER, []), 0), "stage 1 recomputes"),
    ((MEGATRON,), recomputing(two(), 0), "stage 1 recomputes"),
    (OF_BLOCKS, grid(DECODER, ["h.2.attn"]), r"stage 1 holds a part of h\.2 only"),
    ((TITAN, MEGATRON), grid(DECODER, ["lm_head"]), "stage 1 holds a part of the head only"),
    ((DEEPSPEED,), grid(DECODER, ["loss"]), "stage 1 holds a part of lm_head only"),
    ((TORCH,), grid(DECODER, ["loss"]), "between 'lm_head' and 'loss', where no module"),
    ((TORCH,), grid(DECODER, ["h.1.attn", "h.1.add"]), r"the tensor 'h\.0\.add' skips stage 2"),
    ((TORCH,), shuffled(), "stages 1 to 1 are not the first"),
    ((DIFFUSION,), unequal_shares(), ""),
    ((TITAN, MEGATRON), ROUND, "needs a multiple of 2 microbatches, not 5"),
    ((DEEPSPEED,), ROUND, "run several stages each"),
    ((MEGATRON,), BENT, "it has no schedule zb-v"),
    ((TORCH,), recomputing(BENT, 0, 1, 2, 3), "whose backward pass torch cannot divide"),
)


def test_plans_that_cannot_be_expressed_are_refused_with_the_command_that_finds_one() -> None:
    for targets, plan, reason in REFUSED:
        for target in targets:
            text = refusal(target, problem(DECODER), plan)
            assert re.search(reason, text), (target.name, text)
            assert f"{target.title} cannot express the plan {plan.config}: " in text
            assert f"`pipeplan solve … --for {target.name}" in text
    divided = problem(DECODER, options=Options(sharding=Sharding.OPTIMIZER))
    refusal(DIFFUSION, divided, two())
    for target in ALL:
        assert "is for inference" in refusal(target, problem(DECODER), replace(two(), inference=True))
        for options, said in ((Options(inference=True), "leave out --inference"), (Options(), "--batch")):
            with pytest.raises(InputError, match=said):
                target.restrict(DECODER, options)
    with pytest.raises(InputError, match="no schedule gpipe"):
        MEGATRON.restrict(DECODER, Options(schedule=GPIPE, accumulate=8))


def test_models_that_are_no_stack_of_blocks_are_refused_with_the_reason() -> None:
    reason = r"cannot train this model: .* no list of blocks that are all alike.*between an embedding and a head: "
    for name in ("vgg16", "resnet50", "gnmt8", "awd-lm", "s2vt", "mnist"):
        with pytest.raises(InputError, match=reason):
            MEGATRON.restrict(bundled(name), Options(accumulate=8))
        plan = grid(bundled(name), [], schedule=STASHING, accumulate=None)
        assert re.search(reason, refusal(MEGATRON, problem(bundled(name)), plan))
    for target, said in ((TITAN, "has no such model: chain is no list of bl"), (DIFFUSION, "lists of equal blocks")):
        with pytest.raises(InputError, match=said):
            target.restrict(chain(["a", "b", "loss"]), Options(accumulate=2))
    paths = ["0.emb", *(f"1.{n}.{part}" for n in range(3) for part in ("norm", "experts.0", "experts.1")), "2", "loss"]
    stack = stack_of(chain(paths))
    assert (stack.path, [len(block) for block in stack.blocks]) == ("1", [3, 3, 3]), "the lists inside are no stack"
    assert (stack.before, stack.after) == (("0.emb",), ("2", "loss"))
    both = ["emb", *(f"{side}.{n}" for side in ("encoder", "decoder") for n in range(3)), "head", "loss"]
    with pytest.raises(InputError, match="encoder has 3; decoder has 3"):
        stack_of(chain(both))
    tensors = (*DECODER.tensors, Tensor("far", "h.0.add", ("h.3.ln",), 8, 8))
    with pytest.raises(InputError, match=r"h\.0\.add is read after the next block"):
        stack_of(replace(DECODER, tensors=tensors))


def test_weights_that_stages_share_are_refused_by_name_but_what_megatron_ties_itself() -> None:
    shared = tied_decoder(5, "h.0.attn", "h.4.attn")
    for target in (MEGATRON, DEEPSPEED, TORCH, TITAN):
        said = refusal(target, problem(shared), grid(shared, ["h.1.ln"]))
        assert re.search(r"stages 1 and 2 share wte\.weight .* whose gradients this export does not", said)
    for target in (DEEPSPEED, TORCH, TITAN):
        said = refusal(target, problem(tied_decoder(5)), grid(tied_decoder(5), ["h.1.ln"]))
        assert re.search(r"stages 1 and 2 share wte\.weight|wte and lm_head share their weights", said)
    for target in (MEGATRON, TITAN):
        with pytest.raises(InputError, match="wte and lm_head share their weights"):
            target.restrict(decoder(3, tied=True), Options(accumulate=8))
    alone = export_files(TITAN, problem(decoder(3, tied=True)), grid(decoder(3, tied=True), [], replicas=2))
    assert "pipeline_parallel_degree=1" in alone["plan_config.py"].text
    found = solve(problem(shared, options=MEGATRON.restrict(shared, Options(accumulate=8))))
    assert "h.4.attn" in next(stage for stage in found.plan.stages if "h.0.attn" in stage.layers).layers
    assert export_files(MEGATRON, found.problem, found.plan)


def test_another_number_of_microbatches_in_flight_is_reported() -> None:
    plan = two(accumulate=80)
    deeper = replace(plan, stages=(replace(plan.stages[0], depth=4), plan.stages[1]))
    levels = (Level("server", 1, 1e9), Level("cluster", 2, 1e9, latency_s=9e-3))
    slow = Problem(DECODER, Cluster("slow", Device("A100", "cuda", 2**30), levels))
    difference = "in flight: 2-1, where the plan counts on 4-1; "
    for target, file in ((MEGATRON, megatron.FILE), (DEEPSPEED, deepspeed.MODULE)):
        assert "in flight" not in export_files(target, problem(DECODER), plan)[file].text
        assert f"{difference}this may be slower" in export_files(target, problem(DECODER), deeper)[file].text
        # 16 layers take 3 ms each, and each direction 9 ms: a microbatch takes 66 ms, and two are in flight.
        assert f"{difference}so each takes 33 ms or more, not " in export_files(target, slow, deeper)[file].text


def renamed(profile: Profile, name: str) -> Profile:
    """The same model with this name, which its last norm has, too."""

    def new(old: str) -> str:
        return name if old == "ln_f" else old

    layers = [replace(one, name=new(one.name), module=new(one.module)) for one in profile.layers]
    tensors = [
        replace(one, producer=new(one.producer), consumers=tuple(map(new, one.consumers))) for one in profile.tensors
    ]
    named = {"model_name": name, "model_ref": f"{name}.py:f"}
    return replace(profile, layers=tuple(layers), tensors=tuple(tensors), **named)


@pytest.mark.parametrize("target", ALL, ids=lambda target: target.name)
@pytest.mark.parametrize("replicas", [1, 2, 40])
def test_generated_files_are_formatted_and_harmless_whatever_names_contain(
    target: ExportTarget, replicas: int, tmp_path: Path
) -> None:
    profile = renamed(DECODER, NASTY)
    posed = problem(profile, 2, 40)
    posed = replace(posed, cluster=replace(posed.cluster, name=NASTY))
    plan = grid(profile, [NASTY], replicas=replicas, accumulate=2 * replicas)
    plan = recomputing(plan, 0, 1) if target is TORCH else plan

    def run(*command: object) -> None:
        done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    for name, file in export_files(target, posed, plan).items():
        (tmp_path / name).write_text(file.text, encoding="utf-8")
        if name.endswith(".py"):
            assert ast.get_docstring(ast.parse(file.text))
            if target in (TORCH, TITAN):
                run(sys.executable, "-m", "ruff", "format", "--isolated", "--check", name)
                run(sys.executable, "-m", "ruff", "check", "--isolated", *RULES, name)
            assert python_literal(NASTY) in file.text or target is TITAN
        elif name.endswith((".toml", ".json")):
            (tomllib if name.endswith(".toml") else json).loads(file.text)
        elif target is MEGATRON:
            run("bash", "-euc", f"source ./{name}")
            if shutil.which("shellcheck"):
                run("shellcheck", "-s", "bash", name)
    assert not (tmp_path / "broken").exists()


RULES = ("--select", "E4,E7,E9,F,I,UP,B,SIM", "--ignore", "B905")


def test_literals_are_read_back_as_they_were() -> None:
    for value in (NASTY, "plain", "it's", 'a "b"', "", "\udc80", ["a", "b'"], 3):
        assert ast.literal_eval(python_literal(value)) == value

"""The exports to torch.distributed.pipelining and torchtitan: their files, and the plans that they refuse."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from decoders import chain, decoder, grid, problem, refusal

from pipeplan.errors import InputError
from pipeplan.exports.target import ExportFile, ExportTarget, export_files, export_target, python_literal
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import DOUBLE_BUFFERED, FLUSH, GPIPE, STASHING
from pipeplan.problem.options import Options
from pipeplan.profile_data.profile import Profile

TORCH, TITAN = export_target("torch-pipelining"), export_target("torchtitan")
DECODER = replace(decoder(4), model_ref="job.py:make")
NASTY = '"\'"""\\ {{ x }} {% y %}\n$(reboot) \u2028\U0001f600'


def constants(files: dict[str, ExportFile] | Any, name: str = "pipeline.py") -> dict[str, Any]:
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


def test_stages_ranks_and_sizes() -> None:
    plan = grid(DECODER, ["h.1.ln", "h.3.ln"], replicas=2, accumulate=12)
    found = constants(export_files(TORCH, problem(DECODER, 2), plan))
    assert found["SPLIT_SPEC"] == {"h.1": "BEGINNING", "h.3": "BEGINNING"}
    assert found["RANKS"] == [[0, 1], [2, 3], [4, 5]]
    assert (found["STAGES"], found["REPLICAS"]) == (3, 2)
    assert (found["MICROBATCH"], found["MICROBATCHES"]) == (4, 6)
    assert (found["SCHEDULE"], found["BY_ORDER"]) == ("1F1B", False)


def test_copies_of_a_pipeline_are_replicas_on_other_workers() -> None:
    half = grid(DECODER, ["h.2.ln"], replicas=2)
    stages = (replace(half.stages[0], workers=(0, 2)), replace(half.stages[1], workers=(1, 3)))
    copies = replace(half, stages=stages, copies=2)
    assert constants(export_files(TORCH, problem(DECODER), copies))["RANKS"] == [[0, 2], [1, 3]]
    with pytest.raises(InputError, match="must be neighbours"):
        export_files(TITAN, problem(DECODER), copies)


def test_a_split_is_the_end_of_a_module_where_an_operator_follows() -> None:
    profile = chain(["conv", "relu", "fc", "loss"])
    relu = replace(profile.layers[1], module="", op="relu")
    profile = replace(profile, layers=(profile.layers[0], relu, *profile.layers[2:]))
    found = constants(export_files(TORCH, problem(profile), grid(profile, ["relu"])))
    assert found["SPLIT_SPEC"] == {"conv": "END"}


@pytest.mark.parametrize(
    ("schedule", "replicas", "depths"), [(GPIPE, 2, (6, 6, 6)), (FLUSH, 1, (5, 2, 1)), (FLUSH, 2, (3, 2, 1))]
)
def test_the_order_has_every_pass_once_and_as_many_in_flight_as_planned(
    schedule: str, replicas: int, depths: tuple[int, ...]
) -> None:
    each = 6
    plan = grid(DECODER, ["h.1.ln", "h.2.ln"], replicas, each * replicas, schedule=schedule)
    stages = tuple(replace(stage, depth=depth) for stage, depth in zip(plan.stages, depths, strict=True))
    files = export_files(TORCH, problem(DECODER, 2), replace(plan, stages=stages))
    rows = [row.split(",") for row in files["schedule.csv"].text.splitlines()]
    assert len(rows) == 3
    for number, (row, depth) in enumerate(zip(rows, depths, strict=True)):
        assert sorted(row) == sorted(f"{number}{kind}{one}" for kind in "FB" for one in range(each))
        for kind in "FB":
            assert [one for one in row if one[1] == kind] == [f"{number}{kind}{one}" for one in range(each)]
        balance = list(itertools.accumulate(1 if one[1] == "F" else -1 for one in row))
        assert (max(balance), min(balance)) == (depth, 0)
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


def gap() -> Plan:
    plan = grid(DECODER, ["h.2.ln"])
    return replace(plan, stages=(plan.stages[0], replace(plan.stages[1], workers=(3,))))


def unequal() -> Plan:
    plan = grid(DECODER, ["h.2.ln"], accumulate=3)
    return replace(plan, stages=(replace(plan.stages[0], workers=(0, 1, 2)), replace(plan.stages[1], workers=(3,))))


def shuffled() -> Plan:
    """A plan with the second block before the first, which is not the order of forward()."""
    names = [layer.name for layer in DECODER.layers]
    first = [name for name in names if not name.startswith(("h.0", "h.2", "h.3", "l"))]
    rest = [name for name in names if name not in first]
    return Plan((Stage(tuple(first), (0,), 2, 1), Stage(tuple(rest), (1,), 1, 1)), schedule=FLUSH, accumulate=4)


REFUSED: dict[str, tuple[Plan, str]] = {
    "unequal": (unequal(), "stage 1 has 3 workers and stage 2 has 1"),
    "stashing": (grid(DECODER, ["h.2.ln"], schedule=STASHING, accumulate=None), "its schedule 1f1b-stashing is asyn"),
    "2bw": (grid(DECODER, ["h.2.ln"], schedule=DOUBLE_BUFFERED), "its schedule 2bw is asynchronous"),
    "odd": (grid(DECODER, ["h.2.ln"], replicas=2, accumulate=7), "7 minibatches of an update are not the same number"),
    "gap": (gap(), "worker 1 has nothing to do"),
}
FOR_TORCH: dict[str, tuple[Plan, str]] = {
    "skip": (grid(DECODER, ["h.1.attn", "h.1.add"]), "the tensor 'h.0.add' skips stage 2"),
    "order": (shuffled(), "stages 1 to 1 are not the first"),
    "loss": (grid(DECODER, ["loss"]), "between 'lm_head' and 'loss', where no module"),
}
FOR_TITAN: dict[str, tuple[Plan, str]] = {
    "inside": (grid(DECODER, ["h.1.add"]), "stage 1 holds a part of h.1 only"),
    "head": (grid(DECODER, ["lm_head"]), "stage 1 holds a part of the head only"),
    "recompute": (
        replace(grid(DECODER, []), stages=(replace(grid(DECODER, []).stages[0], recompute=True),)),
        "stage 1 recomputes",
    ),
}


@pytest.mark.parametrize(("to", "cases"), [(TORCH, REFUSED | FOR_TORCH), (TITAN, REFUSED | FOR_TITAN)])
def test_plans_that_cannot_be_expressed_are_refused_with_the_command_that_finds_one(
    to: ExportTarget, cases: dict[str, tuple[Plan, str]]
) -> None:
    for plan, reason in cases.values():
        text = refusal(to, problem(DECODER), plan)
        assert reason in text
        assert f"{to.title} cannot express the plan {plan.config}: " in text
        assert f"`pipeplan solve … --for {to.name}" in text
    inference = replace(grid(DECODER, ["h.2.ln"]), inference=True)
    assert "is for inference" in refusal(to, problem(DECODER), inference)
    for options, said in ((Options(inference=True), "leave out --inference"), (Options(), "--batch")):
        with pytest.raises(InputError, match=said):
            to.restrict(DECODER, options)


def test_the_restriction_keeps_what_the_user_asked_for() -> None:
    asked = Options(accumulate=4, schedule=GPIPE, together=(("wte", "h.0.ln"),), max_stages=3)
    found = TORCH.restrict(DECODER, asked)
    assert (found.schedule, found.accumulate, found.max_stages, found.grid) == (GPIPE, 4, 3, True)
    assert found.together[0] == ("wte", "h.0.ln")


def test_torchtitan_takes_models_that_are_lists_of_blocks_only() -> None:
    with pytest.raises(InputError, match="has no such model: chain is no list of blocks"):
        TITAN.restrict(chain(["a", "b", "loss"]), Options(accumulate=2))
    tied = decoder(3, tied=True)
    with pytest.raises(InputError, match="share their weights"):
        TITAN.restrict(tied, Options(accumulate=2))
    alone = export_files(TITAN, problem(tied), grid(tied, [], replicas=2))
    assert "pipeline_parallel_degree=1" in alone["plan_config.py"].text


def test_torchtitan_gets_stages_and_batch_sizes() -> None:
    rotary = decoder(6, rotary=True)  # torchtitan computes the rotary embedding in every stage
    plan = grid(rotary, ["h.0.ln", "h.4.ln"], replicas=2, accumulate=6)
    files = export_files(TITAN, problem(rotary, 2), plan)
    found = constants(files, "plan_config.py")
    assert found["STAGES"] == [
        ["tok_embeddings"],
        [f"layers.{index}" for index in range(4)],
        ["layers.4", "layers.5", "norm", "lm_head"],
    ]
    assert found["BLOCKS"] == 6
    assert "local_batch_size=12,\n        global_batch_size=24," in files["plan_config.py"].text
    assert list(files) == ["plan_config.py"], "torch's own 1F1B has the plan's order"


def inside(profile: Profile, module: str) -> Profile:
    """The same model as a submodule of another one."""

    def moved(name: str) -> str:
        return name if name == "loss" else f"{module}.{name}"

    layers = [replace(one, name=moved(one.name), module=one.module and moved(one.module)) for one in profile.layers]
    tensors = [
        replace(one, producer=moved(one.producer), consumers=tuple(map(moved, one.consumers)))
        for one in profile.tensors
    ]
    return replace(profile, layers=tuple(layers), tensors=tuple(tensors), model_name=module, model_ref=f"{module}.py:f")


@pytest.mark.parametrize("to", [TORCH, TITAN], ids=["torch", "titan"])
@pytest.mark.parametrize(("replicas", "name"), [(1, NASTY), (2, "net"), (40, "net")], ids=["names", "pairs", "many"])
def test_generated_python_is_formatted_and_harmless_whatever_names_contain(
    to: ExportTarget, replicas: int, name: str
) -> None:
    profile = inside(DECODER, name)
    posed = problem(profile, 2, 40)
    posed = replace(posed, cluster=replace(posed.cluster, name=name))
    plan = grid(profile, [f"{name}.h.2.ln"], replicas=replicas, accumulate=2 * replicas)
    plan = replace(plan, stages=tuple(replace(stage, recompute=to is TORCH) for stage in plan.stages))
    files = export_files(to, posed, plan)
    for file in (one for path, one in files.items() if path.endswith(".py")):
        assert ast.get_docstring(ast.parse(file.text))
        for check in (["format", "--check"], ["check", "--select", "E4,E7,E9,F,I,UP,B,SIM", "--ignore", "B905"]):
            command = [sys.executable, "-m", "ruff", check[0], "--isolated", *check[1:], "-"]
            done = subprocess.run(command, input=file.text, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    if to is TORCH:
        assert constants(files)["SPLIT_SPEC"] == {f"{name}.h.2": "BEGINNING"}


def test_literals_are_read_back_as_they_were() -> None:
    for value in (NASTY, "plain", "it's", 'a "b"', "", "\udc80", ["a", "b'"], 3):
        assert ast.literal_eval(python_literal(value)) == value

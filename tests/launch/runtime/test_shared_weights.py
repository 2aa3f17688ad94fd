"""Stages that share weights train as one process does: each has a copy, and gradients are summed over the copies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from extents import slow_but_for
from literal import Recipe, train_on_whole_batches
from semantics_workers import CUT_TIES, OPTIMIZERS, Case, CaseRun

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.schedule import SCHEDULES
from pipeplan_launch.runtime import stage_setup

torch.set_num_threads(1)

RELATIVE = 1e-9
"""Of a tensor's largest element: in 64-bit numbers only rounding remains."""
SHAPES = {(1, 1): 2, (1, 1, 1): 3, (2, 1): 5, (1, 2): 4, (3, 2): 6, (2, 1, 2): 4}
"""Replicas, and minibatches per update: a multiple of the replicas or not."""


def case_of(replicas: tuple[int, ...], schedule: str = "1f1b-flush", optimizer: str = "sgd-foreach") -> Case:
    """Two epochs of four updates, the last of them short, with a smaller last minibatch."""
    accumulate = SHAPES[replicas]
    depths = tuple(-(-accumulate // count) for count in replicas)
    samples = 3 * (3 * accumulate + 1) + 2
    return Case("decoder", schedule, replicas, depths, accumulate, optimizer, samples, dropout=False)


def check(folder: Path, case: Case) -> dict[str, torch.Tensor]:
    """Compare every worker's parameters with those of one process; returns the latter."""
    run = CaseRun(folder, case)
    subject = CUT_TIES[case.subject]
    recipe = Recipe(case.schedule, case.replicas, case.depths, case.accumulate, case.minibatch, case.epochs)
    model, data = subject.build(dropout=False), subject.data(case.samples)
    optimizer = OPTIMIZERS[case.optimizer]
    expected = train_on_whole_batches(model, data, subject.loss, optimizer, replace(recipe, clip=case.clip))
    holders = dict.fromkeys(expected, 0)
    for replicas in run.left():
        for found in replicas:
            for name, value in found["parameters"].items():
                off = (value - expected[name]).abs().max() / expected[name].abs().max()
                assert off <= RELATIVE, f"{name} is off by {off:.1e}"
        for name in replicas[0]["parameters"]:
            holders[name] += 1
    shared = {name for name, count in holders.items() if count > 1}
    if len(case.replicas) > 1:
        assert shared == {"words.weight"} | ({"mix.weight", "mix.bias"} if "norm1" in case.cuts else set())
    return expected


@pytest.mark.parametrize("replicas", slow_but_for([(1, 1), (1, 1, 1), (2, 1), (1, 2)], SHAPES))
def test_equals_one_process(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    check(tmp_path, case_of(replicas))


@pytest.mark.parametrize("replicas", slow_but_for([(2, 1)], SHAPES), ids=str)
def test_equals_one_process_in_the_one_order(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    """The exchange of shared weights is a node of the order; over Gloo."""
    check(tmp_path, replace(case_of(replicas), transport="nccl"))


@pytest.mark.parametrize("replicas", slow_but_for([(3, 2)], SHAPES))
def test_equals_one_process_under_gpipe_with_adamw(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    check(tmp_path, case_of(replicas, "gpipe", "adamw-fused"))


@pytest.mark.parametrize("replicas", slow_but_for([(1, 1, 1)], SHAPES))
def test_equals_one_process_with_gradients_of_weights_put_off(tmp_path: Path, replicas: tuple[int, ...]) -> None:
    check(tmp_path, case_of(replicas, "zb-h1"))


def test_the_norm_of_all_gradients_counts_a_shared_one_once(tmp_path: Path) -> None:
    clipped = check(tmp_path, replace(case_of((2, 1)), clip=0.3))
    free = check(tmp_path / "free", case_of((2, 1)))
    assert max(float((clipped[name] - value).abs().max()) for name, value in free.items()) > 1e-3


CHANGES = [((1, 2), (1, 1, 1)), ((1, 1, 1), (1,)), ((1,), (2, 1)), ((2, 1), (1, 1, 1))]
"""Replicas of the plan that wrote a checkpoint, and of the one that goes on from it."""


@pytest.mark.parametrize("plans", slow_but_for([CHANGES[0]], CHANGES), ids=str)
def test_another_plan_goes_on_from_a_checkpoint(tmp_path: Path, plans: tuple[tuple[int, ...], ...]) -> None:
    """Other stages hold the copies, also one stage for all; still the result is that of one process."""
    first, second = (
        Case(
            "decoder", "1f1b-flush", plan, tuple(-(-4 // count) for count in plan), 4, "adamw-fused", 41, epochs=epochs
        )
        for plan, epochs in zip(plans, (1, 2), strict=True)
    )
    CaseRun(tmp_path / "before", replace(first, dropout=False)).left()
    check(tmp_path / "after", replace(second, dropout=False, resume=tmp_path / "before" / "run"))
    for number, name in enumerate(("before", "after")):
        said = [json.loads(line) for one in (tmp_path / name / "run" / "metrics").iterdir() for line in one.open()]
        assert {line["epoch"] for line in said} == {number}, "each plan trained one epoch"


def test_a_checkpoint_holds_a_shared_weight_once(tmp_path: Path) -> None:
    check(tmp_path, case_of((1, 2), optimizer="adamw-fused"))
    (manifest,) = (tmp_path / "run" / "checkpoints").glob("*/manifest.json")
    content = json.loads(manifest.read_text())
    trained = [name for group in content["optimizer"]["groups"] for name in group["names"]]
    assert sorted(trained) == sorted({*trained})
    assert content["state_dict"]["head.weight"] == content["state_dict"]["words.weight"] == "words.weight"
    assert {"words.weight", "mix.weight"} <= {*trained}
    assert [name for name in content["tensors"] if name.endswith("words.weight")] == ["model.words.weight"]
    assert "model.head.weight" not in content["tensors"]


@pytest.mark.parametrize("schedule", ["1f1b-stashing", "vertical-sync", "2bw"])
def test_asynchronous_schedules_refuse_copies_in_one_line(schedule: str) -> None:
    """Their stages update at different times, so that the copies would differ."""
    program = SimpleNamespace(shared={"words.weight": (0, 2)})
    with pytest.raises(LaunchError) as told:
        stage_setup._check_shared(_plan(schedule), program)  # type: ignore[arg-type]
    assert str(told.value) == (
        f"stages 0, 2 share the parameter 'words.weight', and {schedule} updates them at different times: solve with "
        "--schedule 1f1b-flush or gpipe, or for a plan with its layers in one stage"
    )
    stage_setup._check_shared(_plan(schedule), SimpleNamespace(shared={}))  # type: ignore[arg-type]
    for flushing in ("1f1b-flush", "gpipe", "zb-h1"):
        stage_setup._check_shared(_plan(flushing), program)  # type: ignore[arg-type]


def _plan(schedule: str) -> LaunchPlan:
    return SimpleNamespace(mode="training", schedule=SCHEDULES[schedule])  # type: ignore[return-value]

"""Workers with several stages each leave the parameters that one process would, and go on from any plan's checkpoint.

64-bit numbers; the last group of minibatches is short, and so is the last minibatch.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from literal import Recipe, Trained, train
from schedule_rules import of_devices
from semantics_workers import ALL_SUBJECTS, OPTIMIZERS, Case, CaseRun

from pipeplan_launch.plan.schedule import SCHEDULES

torch.set_num_threads(1)
RELATIVE = 1e-10
"""Of a tensor's largest element."""


def case_of(schedule: str, devices: int, chunks: int, accumulate: int, replicas: int = 1, **options: Any) -> Case:
    """Two epochs of two whole groups and a short one."""
    shapes = of_devices(SCHEDULES[schedule], devices, chunks, replicas, accumulate)
    cuts = random.Random(devices * 100 + chunks).sample(range(1, 12), len(shapes) - 1)
    return Case(
        "deep",
        schedule,
        tuple(shape.replicas for shape in shapes),
        tuple(shape.depth for shape in shapes),
        accumulate,
        options.pop("optimizer", "sgd-fused"),
        samples=options.pop("samples", 3 * (2 * accumulate + 1) + 2),
        deferred=tuple(shape.deferred for shape in shapes),
        devices=devices,
        layers_between=tuple(f"layer{number}" for number in sorted(cuts)),
        **options,
    )


def literally(case: Case) -> Trained:
    subject = ALL_SUBJECTS[case.subject]
    recipe = Recipe(
        case.schedule,
        case.replicas,
        case.depths,
        case.accumulate,
        case.minibatch,
        case.epochs,
        seed=case.seed,
        clip=case.clip,
    )
    model, data = subject.build(case.dropout), subject.data(case.samples)
    return train(model, case.cuts, data, subject.loss, OPTIMIZERS[case.optimizer], recipe, subject.loss_weight)


def check(folder: Path, case: Case) -> None:
    run, expected = CaseRun(folder, case), literally(case)
    for stage, replicas in enumerate(run.left()):
        for found in replicas:
            for kind, wanted in (("parameters", expected.parameters[stage]), ("buffers", expected.buffers[stage])):
                assert found[kind].keys() == wanted.keys()
                for name, value in wanted.items():
                    off = float((found[kind][name].double() - value).abs().max() / value.abs().max().clamp_min(1e-300))
                    assert off <= RELATIVE, f"stage {stage}: {name} is off by {off:.1e}"


@pytest.mark.parametrize(
    ("schedule", "devices", "chunks", "accumulate", "options"),
    [
        ("interleaved-1f1b", 2, 2, 5, {"clip": 0.3}),
        ("zb-v", 2, 2, 5, {"clip": 0.3}),
        pytest.param("interleaved-1f1b", 2, 3, 4, {"optimizer": "sgd-foreach"}, marks=pytest.mark.slow),
        pytest.param("interleaved-1f1b", 1, 3, 3, {}, marks=pytest.mark.slow),
        pytest.param("interleaved-1f1b", 3, 2, 6, {"recompute": True}, marks=pytest.mark.slow),
        pytest.param("interleaved-1f1b", 2, 2, 6, {"replicas": 2, "shards": True}, marks=pytest.mark.slow),
        pytest.param("interleaved-1f1b", 2, 2, 5, {"replicas": 2, "clip": 0.3, "samples": 20}, marks=pytest.mark.slow),
        pytest.param("zb-v", 3, 2, 7, {}, marks=pytest.mark.slow),
        pytest.param("zb-v", 1, 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("zb-v", 2, 2, 5, {"replicas": 2, "clip": 0.3}, marks=pytest.mark.slow),
        pytest.param("zb-v", 3, 2, 4, {"recompute": True}, marks=pytest.mark.slow),
    ],
)
def test_equals_one_process(
    tmp_path: Path, schedule: str, devices: int, chunks: int, accumulate: int, options: dict[str, Any]
) -> None:
    check(tmp_path, case_of(schedule, devices, chunks, accumulate, **options))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_minibatches_count_by_their_weight(tmp_path: Path, schedule: str) -> None:
    case = case_of(schedule, 2, 2, 5, samples=50)
    check(tmp_path, replace(case, subject="tagger", layers_between=("one", "two", "last")))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_plans_equal_one_process(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    schedule = random_.choice(["interleaved-1f1b", "zb-v"])
    devices, replicas = random_.choice([(1, 2), (2, 1), (2, 2), (3, 1), (4, 1)])
    chunks = 2 if schedule == "zb-v" else random_.randint(1, 11 // devices)
    case = case_of(schedule, devices, chunks, random_.randint(1, 9), replicas, samples=3 * random_.randint(1, 20) + 2)
    check(tmp_path, replace(case, clip=random_.choice([None, 0.3]), recompute=random_.random() < 0.3))


PLANS = {
    "interleaved": lambda: case_of("interleaved-1f1b", 2, 3, 4, optimizer="adamw-fused", dropout=False),
    "zb-v": lambda: case_of("zb-v", 2, 2, 4, optimizer="adamw-fused", dropout=False),
    "divided": lambda: case_of(
        "interleaved-1f1b", 2, 2, 4, 2, optimizer="adamw-fused", dropout=False, shards=True, samples=29
    ),
    "one stage each": lambda: Case(
        "deep",
        *("1f1b-flush", (1, 2), (2, 1), 4, "adamw-fused"),
        samples=29,
        dropout=False,
        layers_between=("layer4",),
    ),
}
"""Plans that update alike; dropout is seeded by the stage."""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("divided", "zb-v"),
        pytest.param("interleaved", "divided", marks=pytest.mark.slow),
        pytest.param("zb-v", "one stage each", marks=pytest.mark.slow),
        pytest.param("one stage each", "interleaved", marks=pytest.mark.slow),
    ],
)
def test_any_plan_goes_on_from_a_checkpoint(tmp_path: Path, first: str, second: str) -> None:
    CaseRun(tmp_path / "before", replace(PLANS[first](), epochs=1)).left()
    case = replace(PLANS[second](), epochs=2, resume=tmp_path / "before" / "run")
    run, expected = CaseRun(tmp_path / "after", case), literally(case)
    for stage, replicas in enumerate(run.left()):
        for name, value in expected.parameters[stage].items():
            assert torch.allclose(replicas[0]["parameters"][name], value, rtol=0, atol=1e-9), name

"""Parameters after training by real workers equal those of one process that applies the formula of each semantics.

64-bit numbers, at least 20 updates of every stage over two drained segments, the last group of each with fewer members
where that can be, and with a smaller last minibatch.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from extents import slow_but_for
from literal import Recipe, Trained, train, train_on_whole_batches
from schedule_rules import depths_for, fitted, least, of_devices
from semantics_workers import ALL_SUBJECTS, OPTIMIZERS, SUBJECTS, Case, CaseRun

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.schedule import SCHEDULES as KNOWN
from pipeplan_launch.runtime import stage_setup

torch.set_num_threads(1)

RELATIVE = 1e-9
"""Of a tensor's largest element. What remains is rounding: 1e-14 with SGD, up to 1e-10 where AdamW divides noise."""
ASYNCHRONOUS, FLUSHED = ("1f1b-stashing", "vertical-sync"), ("gpipe", "1f1b-flush", "zb-h1")
STALE = (*ASYNCHRONOUS, "2bw")
SCHEDULES = (*STALE, *FLUSHED)
SHAPES = {(1, 1, 1): 3, (2, 1): 5, (1, 2): 3, (2, 1, 1): 4}
"""Replicas, and minibatches per update where the schedule has them: a multiple of the replicas or not."""


def case_of(
    subject: str, schedule: str, replicas: tuple[int, ...], optimizer: str, accumulate: int = 0, **options: Any
) -> Case:
    """Two epochs: ten updates of the widest stage, then one whole minibatch and one of two samples."""
    accumulate = accumulate or SHAPES[replicas]
    group = max(replicas) if schedule in ASYNCHRONOUS else accumulate
    deep = [-(-accumulate // count) for count in replicas] if schedule == "gpipe" else depths_for(replicas)
    case = Case(subject, schedule, replicas, tuple(deep), accumulate, optimizer, samples=3 * (10 * group + 1) + 2)
    return replace(case, **options)


DEFAULT = [
    # Every model, every schedule and every shape.
    case_of("chain", "1f1b-stashing", (1, 1, 1), "sgd-foreach"),
    case_of("resnet", "vertical-sync", (2, 1), "sgd-fused"),
    case_of("encoder-decoder", "2bw", (1, 2), "adamw-fused"),
    case_of("tied", "gpipe", (2, 1, 1), "sgd-foreach"),
    case_of("resnet", "zb-h1", (2, 1), "adamw-fused"),
    case_of("tied", "vertical-sync", (1, 2), "sgd-fused", correction="ef"),
    case_of("tied", "1f1b-flush", (1, 2), "adamw-fused", shards=True),
    case_of("chain", "2bw", (2, 1, 1), "sgd-foreach", shards=True, correction="ef"),
    case_of("chain", "1f1b-stashing", (3, 2, 1), "adamw-fused", 5, clip=0.3, shards=True, correction="ef"),
    case_of("chain", "1f1b-stashing", (2, 1), "sgd-fused", epochs=3, flush_epochs=1, correction="ef"),
    case_of("resnet", "1f1b-stashing", (2, 1), "sgd-fused", recompute=True),
    # Depths that are not those of the schedule, and fewer minibatches than replicas.
    case_of("chain", "1f1b-stashing", (3, 2, 1), "sgd-fused", 10, samples=71, epochs=3, depths=(4, 2, 1)),
    case_of("chain", "1f1b-stashing", (2, 1), "sgd-fused", 4, samples=3, epochs=3),
]


def random_case(seed: int) -> Case:
    """Of any model, schedule, shape and length, with the options that the schedule has."""
    draw = random.Random(seed)
    schedule = draw.choice(SCHEDULES)
    replicas = draw.choice([*SHAPES, (1, 1), (3, 2, 1), (1, 3), (2, 2), (1,), (2,), (5,), (3, 1)])
    stale = schedule in STALE and len(replicas) > 1
    options: dict[str, Any] = {
        "samples": 3 * draw.randint(1, 30) + draw.randint(0, 2),
        "epochs": draw.randint(2, 3),
        "recompute": draw.random() < 0.2,
        "clip": draw.choice([None, None, 0.3]),
        "shards": max(replicas) > 1 and draw.random() < 0.3,
        "correction": draw.choice(["ef", "none"]) if stale else "none",
        "flush_epochs": draw.choice([0, 0, 1]) if stale else 0,
    }
    accumulate = max(least(KNOWN[schedule], replicas), 2) + draw.randint(0, 3)
    optimizer = draw.choice(["sgd-foreach", "sgd-fused", "adamw-fused"])
    options["depths"] = tuple(shape.depth for shape in fitted(KNOWN[schedule], replicas, accumulate))
    return case_of(draw.choice(list(SUBJECTS)), schedule, replicas, optimizer, accumulate, **options)


def name_of(case: Case) -> str:
    fields = ("shards", "correction", "clip", "recompute", "flush_epochs")
    more = [f"{name} {getattr(case, name)}" for name in fields if getattr(case, name) != getattr(Case, name)]
    return " ".join([case.subject, case.schedule, "-".join(map(str, case.replicas)), case.optimizer, *more])


def recipe_of(case: Case) -> Recipe:
    names = ("replicas", "depths", "accumulate", "minibatch", "epochs", "seed", "clip", "correction", "flush_epochs")
    return Recipe(case.schedule, **{name: getattr(case, name) for name in names})


def literally(case: Case) -> Trained:
    subject = ALL_SUBJECTS[case.subject]
    model, data = subject.build(case.dropout), subject.data(case.samples)
    arguments = data, subject.loss, OPTIMIZERS[case.optimizer], recipe_of(case), subject.loss_weight
    return train(model, case.cuts, *arguments)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the largest element of the tensor."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300))


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(difference(one[name].double(), value.double()) for name, value in other.items())


def check(folder: Path, case: Case, relative: float = RELATIVE) -> Trained:
    """Run a case both ways, side by side, and compare what every replica of every stage is left with."""
    run = CaseRun(folder, case)
    expected = literally(case)
    for stage, replicas in enumerate(run.left()):
        for found in replicas:
            for kind, wanted in (("parameters", expected.parameters[stage]), ("buffers", expected.buffers[stage])):
                assert found[kind].keys() == wanted.keys()
                for name, value in wanted.items():
                    off = difference(found[kind][name].double(), value.double())
                    assert off <= relative, f"stage {stage}: {name} is off by {off:.1e}"
    return expected


def on_whole_batches(case: Case) -> dict[str, torch.Tensor]:
    """What one process has after it trained on all samples of an update at once."""
    subject = ALL_SUBJECTS[case.subject]
    model, data = subject.build(dropout=False), subject.data(case.samples)
    return train_on_whole_batches(model, data, subject.loss, OPTIMIZERS[case.optimizer], recipe_of(case))


def check_on_whole_batches(folder: Path, case: Case) -> dict[str, torch.Tensor]:
    """Where samples do not depend on each other, a flush is one process on the whole batch; copies stay equal."""
    run, expected = CaseRun(folder, case), on_whole_batches(case)
    holders = dict.fromkeys(expected, 0)
    for replicas in run.left():
        for found in replicas:
            parameters = found["parameters"]
            assert largest_difference(parameters, {name: expected[name] for name in parameters}) <= RELATIVE
        for name in replicas[0]["parameters"]:
            holders[name] += 1
    if case.subject == "decoder" and len(case.replicas) > 1:
        shared = {name for name, count in holders.items() if count > 1}
        assert shared == {"words.weight"} | ({"mix.weight", "mix.bias"} if "norm1" in case.cuts else set())
    return expected


@pytest.mark.parametrize("case", DEFAULT, ids=name_of)
def test_equals_the_formula(tmp_path: Path, case: Case) -> None:
    expected = check(tmp_path, case)
    assert min(expected.updates) >= 20 or case.samples in (3, 71)
    for change, effect in (({"correction": "none"}, 1e-5), ({"clip": None}, 1e-3 if "sgd" in case.optimizer else 1e-5)):
        if (other := replace(case, **change)) != case:
            assert largest_difference(expected.whole(), literally(other).whole()) > effect, "the option has an effect"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_random_cases_equal_the_formula(tmp_path: Path, seed: int) -> None:
    check(tmp_path, random_case(seed))


WEIGHTED = [
    case_of("tagger", "1f1b-stashing", (2, 1), "sgd-foreach"),
    case_of("tagger", "zb-h1", (1, 2), "adamw-fused"),
    case_of("tagger", "1f1b-flush", (2, 1), "sgd-foreach"),
    case_of("tagger", "vertical-sync", (2, 1, 1), "adamw-fused"),
    case_of("tagger", "2bw", (1, 2), "sgd-fused", transport="nccl"),
    case_of("tagger", "gpipe", (1, 1, 1), "sgd-foreach"),
]


@pytest.mark.parametrize("case", slow_but_for(WEIGHTED[:2], WEIGHTED), ids=name_of)
def test_minibatches_count_by_their_weight(tmp_path: Path, case: Case) -> None:
    """A loss over valid targets, of which some minibatches have none; each stage has groups of its own."""
    weighted = check(tmp_path, case).whole()
    assert all(bool(value.isfinite().all()) for value in weighted.values())
    if case.schedule in FLUSHED:
        assert largest_difference(weighted, on_whole_batches(case)) <= RELATIVE


@pytest.mark.parametrize("subject", slow_but_for(["chain"], SUBJECTS))
def test_the_formulas_can_be_told_apart(subject: str) -> None:
    """By a million times the tolerance: a version too new or too old at any stage would be noticed."""
    ordinary = case_of(subject, "1f1b-stashing", (2, 1), "sgd-fused")
    others = [replace(ordinary, schedule=schedule) for schedule in SCHEDULES if schedule not in ("gpipe", "zb-h1")]
    others += [replace(ordinary, depths=(3, 1)), replace(ordinary, depths=(2, 2)), replace(ordinary, seed=1)]
    for one, other in itertools.combinations([literally(case).whole() for case in others], 2):
        assert largest_difference(one, other) > 1e6 * RELATIVE


# Stages that share weights: each has a copy, and gradients are summed over the copies.

TIED_SHAPES = {(1, 1): 2, (1, 1, 1): 3, (2, 1): 5, (1, 2): 4, (3, 2): 6, (2, 1, 2): 4}
"""Replicas, and minibatches per update: a multiple of the replicas or not."""


def tied(replicas: tuple[int, ...], schedule: str = "1f1b-flush", optimizer: str = "sgd-foreach", **more: Any) -> Case:
    """Two epochs of four updates, the last of them short, with a smaller last minibatch."""
    accumulate = more.pop("accumulate", 0) or TIED_SHAPES[replicas]
    deep = tuple(-(-accumulate // count) for count in replicas)
    samples = more.pop("samples", 3 * (3 * accumulate + 1) + 2)
    return Case("decoder", schedule, replicas, deep, accumulate, optimizer, samples, dropout=False, **more)


TIED = [
    tied((1, 1, 1), transport="nccl"),  # the exchange is a node of the one order
    tied((3, 2), "gpipe", "adamw-fused"),
    tied((1, 1, 1), "zb-h1"),
    tied((2, 1), clip=0.3),
]


@pytest.mark.parametrize("case", slow_but_for(TIED, [*TIED, *map(tied, TIED_SHAPES)]), ids=name_of)
def test_stages_that_share_weights_equal_one_process(tmp_path: Path, case: Case) -> None:
    expected = check_on_whole_batches(tmp_path, case)
    if case.clip:
        free = on_whole_batches(replace(case, clip=None))
        assert max(float((expected[name] - value).abs().max()) for name, value in free.items()) > 1e-3


CHANGES = [((1, 2), (1, 1, 1)), ((1, 1, 1), (1,)), ((1,), (2, 1)), ((2, 1), (1, 1, 1))]
"""Replicas of the plan that wrote a checkpoint, and of the one that goes on from it."""


@pytest.mark.parametrize("plans", slow_but_for([CHANGES[0]], CHANGES), ids=str)
def test_a_checkpoint_holds_a_shared_weight_once_for_any_plan(
    tmp_path: Path, plans: tuple[tuple[int, ...], ...]
) -> None:
    """Other stages hold the copies, also one stage for all; still the result is that of one process."""
    options: dict[str, Any] = {"accumulate": 4, "samples": 41}
    CaseRun(tmp_path / "before", tied(plans[0], optimizer="adamw-fused", epochs=1, **options)).left()
    (manifest,) = (tmp_path / "before" / "run" / "checkpoints").glob("*/manifest.json")
    content = json.loads(manifest.read_text())
    trained = [name for group in content["optimizer"]["groups"] for name in group["names"]]
    assert sorted(trained) == sorted({*trained, "words.weight", "mix.weight"})
    assert content["state_dict"]["head.weight"] == content["state_dict"]["words.weight"] == "words.weight"
    assert [name for name in content["tensors"] if name.endswith("words.weight")] == ["model.words.weight"]
    assert "model.head.weight" not in content["tensors"]
    second = tied(plans[1], optimizer="adamw-fused", resume=tmp_path / "before" / "run", **options)
    check_on_whole_batches(tmp_path / "after", second)
    said = [json.loads(line) for one in (tmp_path / "after" / "run" / "metrics").iterdir() for line in one.open()]
    assert {line["epoch"] for line in said} == {1}, "the second plan trained one epoch"


def test_asynchronous_schedules_refuse_copies_in_one_line() -> None:
    """Their stages update at different times, so that the copies would differ."""
    program: Any = SimpleNamespace(shared={"words.weight": (0, 2)})
    for name in SCHEDULES:
        plan: Any = SimpleNamespace(mode="training", schedule=KNOWN[name])
        stage_setup._check_shared(plan, SimpleNamespace(shared={}))  # type: ignore[arg-type]
        if name in FLUSHED:
            stage_setup._check_shared(plan, program)
            continue
        with pytest.raises(LaunchError, match=f"^stages 0, 2 share the parameter 'words.weight', and {name} updates"):
            stage_setup._check_shared(plan, program)


# Workers that run several stages each.


def virtual(schedule: str, devices: int, chunks: int, accumulate: int, replicas: int = 1, **options: Any) -> Case:
    """Two epochs of two whole groups and a short one."""
    shapes = of_devices(KNOWN[schedule], devices, chunks, replicas, accumulate)
    cuts = random.Random(devices * 100 + chunks).sample(range(1, 12), len(shapes) - 1)
    counts, deep, deferred = (tuple(getattr(one, name) for one in shapes) for name in ("replicas", "depth", "deferred"))
    case = Case("deep", schedule, counts, deep, accumulate, "sgd-fused", samples=3 * (2 * accumulate + 1) + 2)
    layers = tuple(f"layer{number}" for number in sorted(cuts))
    return replace(case, **{"devices": devices, "deferred": deferred, "layers_between": layers} | options)


VIRTUAL = [
    virtual("interleaved-1f1b", 2, 2, 5, clip=0.3),
    virtual("zb-v", 2, 2, 5, clip=0.3),
    virtual("interleaved-1f1b", 1, 3, 3),
    virtual("interleaved-1f1b", 3, 2, 6, recompute=True),
    virtual("interleaved-1f1b", 2, 2, 6, 2, shards=True),
    *(
        virtual(schedule, 2, 2, 5, samples=50, subject="tagger", layers_between=("one", "two", "last"))
        for schedule in ("interleaved-1f1b", "zb-v")
    ),
]


@pytest.mark.parametrize("case", slow_but_for(VIRTUAL[:2], VIRTUAL), ids=name_of)
def test_workers_with_several_stages_equal_one_process(tmp_path: Path, case: Case) -> None:
    check(tmp_path, case, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_plans_of_several_stages_equal_one_process(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    schedule = draw.choice(["interleaved-1f1b", "zb-v"])
    devices, replicas = draw.choice([(1, 2), (2, 1), (2, 2), (3, 1), (4, 1)])
    chunks = 2 if schedule == "zb-v" else draw.randint(1, 11 // devices)
    case = virtual(schedule, devices, chunks, draw.randint(1, 9), replicas, samples=3 * draw.randint(1, 20) + 2)
    check(tmp_path, replace(case, clip=draw.choice([None, 0.3]), recompute=draw.random() < 0.3), 1e-10)


ALIKE: Sequence[Case] = [
    virtual("interleaved-1f1b", 2, 2, 4, 2, shards=True, samples=29),
    virtual("zb-v", 2, 2, 4),
    virtual("interleaved-1f1b", 2, 3, 4),
    Case("deep", "1f1b-flush", (1, 2), (2, 1), 4, "", samples=29, layers_between=("layer4",)),
]
"""Plans that update alike; dropout is seeded by the stage."""


@pytest.mark.parametrize("first", slow_but_for([0], range(4)))
def test_any_plan_goes_on_from_a_checkpoint_of_several_stages(tmp_path: Path, first: int) -> None:
    before, after = (
        replace(ALIKE[number % 4], optimizer="adamw-fused", dropout=False) for number in (first, first + 1)
    )
    CaseRun(tmp_path / "before", replace(before, epochs=1)).left()
    run = CaseRun(tmp_path / "after", replace(after, resume=tmp_path / "before" / "run"))
    expected = literally(after)
    for stage, replicas in enumerate(run.left()):
        for name, value in expected.parameters[stage].items():
            assert torch.allclose(replicas[0]["parameters"][name], value, rtol=0, atol=1e-9), name

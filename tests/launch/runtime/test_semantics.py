"""Parameters after training by real workers equal those of one process that applies the formula of each semantics.

64-bit numbers, at least 20 updates of every stage over two drained segments, the last group of each with fewer members
where that can be, and with a smaller last minibatch.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from extents import slow_but_for
from literal import Recipe, Trained, train, train_on_whole_batches
from semantics_workers import ALL_SUBJECTS, OPTIMIZERS, SUBJECTS, Case, CaseRun
from toy_workers import depths

torch.set_num_threads(1)

RELATIVE = 1e-9
"""Of a tensor's largest element. What remains is rounding: 1e-14 with SGD, up to 1e-10 where AdamW divides noise."""
ASYNCHRONOUS, FLUSHED = ("1f1b-stashing", "vertical-sync"), ("gpipe", "1f1b-flush", "zb-h1")
SCHEDULES = (*ASYNCHRONOUS, "2bw", *FLUSHED)
SHAPES = {(1, 1, 1): 3, (2, 1): 5, (1, 2): 3, (2, 1, 1): 4}
"""Replicas, and minibatches per update where the schedule has them: a multiple of the replicas or not."""
ONE_SCHEDULE = [
    schedule if schedule == "1f1b-stashing" else pytest.param(schedule, marks=pytest.mark.slow)
    for schedule in SCHEDULES
]
"""The others are slow tests."""


PRESETS = {"nesterov": "1f1b-stashing", "muon": "2bw"}
"""The optimisers of presets for job files, in tests of their own, and the schedule that each is meant for."""


def case_of(subject: str, schedule: str, replicas: tuple[int, ...], optimizer: str, accumulate: int = 0) -> Case:
    """Two epochs: ten updates of the widest stage, then one whole minibatch and one of two samples."""
    accumulate = accumulate or SHAPES[replicas]
    group = max(replicas) if schedule in ASYNCHRONOUS else accumulate
    deep = [-(-accumulate // count) for count in replicas] if schedule == "gpipe" else depths(replicas)
    return Case(subject, schedule, replicas, tuple(deep), accumulate, optimizer, samples=3 * (10 * group + 1) + 2)


def every_case() -> list[Case]:
    """Models, schedules and shapes in every combination, with the optimisers in turn."""
    optimizers = itertools.cycle([name for name in OPTIMIZERS if name not in PRESETS])
    combinations = itertools.product(SUBJECTS, SCHEDULES, SHAPES)
    return [case_of(*combination, next(optimizers)) for combination in combinations]


def name_of(case: Case) -> str:
    return " ".join([case.subject, case.schedule, "-".join(map(str, case.replicas)), case.optimizer])


def recipe_of(case: Case) -> Recipe:
    shared = {name: getattr(case, name) for name in ("replicas", "depths", "accumulate", "minibatch", "epochs")}
    late: dict[str, Any] = {"correction": case.correction, "flush_epochs": case.flush_epochs}
    return Recipe(case.schedule, **shared, seed=case.seed, clip=case.clip, **late)


def literally(case: Case) -> Trained:
    subject = ALL_SUBJECTS[case.subject]
    model, data = subject.build(case.dropout), subject.data(case.samples)
    arguments = data, subject.loss, OPTIMIZERS[case.optimizer], recipe_of(case), subject.loss_weight
    return train(model, case.cuts, *arguments)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative to the largest element of the tensor."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300))


def check(folder: Path, case: Case) -> Trained:
    """Run a case both ways, side by side, and compare what every replica of every stage is left with."""
    run = CaseRun(folder, case)
    expected = literally(case)
    for stage, replicas in enumerate(run.left()):
        for replica, found in enumerate(replicas):
            for kind, wanted in (("parameters", expected.parameters[stage]), ("buffers", expected.buffers[stage])):
                assert found[kind].keys() == wanted.keys()
                for name, value in wanted.items():
                    off = difference(found[kind][name].double(), value.double())
                    assert off <= RELATIVE, f"stage {stage} replica {replica}: {name} is off by {off:.1e}"
    return expected


def mark_all_but_a_diagonal(cases: list[Case]) -> list[Any]:
    """Every model, every schedule and every shape at least once; the other combinations are slow tests."""
    models, shapes = list(SUBJECTS), list(SHAPES)
    quick = {
        (models[turn % len(models)], schedule, shapes[turn % len(shapes)]) for turn, schedule in enumerate(SCHEDULES)
    }
    return [
        pytest.param(
            case,
            marks=[] if (case.subject, case.schedule, case.replicas) in quick else pytest.mark.slow,
            id=name_of(case),
        )
        for case in cases
    ]


@pytest.mark.parametrize("case", mark_all_but_a_diagonal(every_case()))
def test_equals_the_formula(tmp_path: Path, case: Case) -> None:
    trained = check(tmp_path, case)
    assert min(trained.updates) >= 20


@pytest.mark.parametrize(
    "replicas", [(1, 1, 1), *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES if shape != (1, 1, 1))]
)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_equals_the_formula(tmp_path: Path, preset: str, replicas: tuple[int, ...]) -> None:
    check(tmp_path, case_of("chain", PRESETS[preset], replicas, preset))


STALE = (*ASYNCHRONOUS, "2bw")
QUICK_CORRECTED = {("resnet", "2bw", (1, 1, 1)), ("tied", "vertical-sync", (1, 2))}
CORRECTED = [
    pytest.param(
        replace(case, correction="ef"),
        marks=[] if (case.subject, case.schedule, case.replicas) in QUICK_CORRECTED else pytest.mark.slow,
        id=name_of(case),
    )
    for case in every_case()
    if case.schedule in STALE
]


@pytest.mark.parametrize("case", CORRECTED)
def test_corrected_updates_equal_the_formula(tmp_path: Path, case: Case) -> None:
    corrected, plain = check(tmp_path, case).whole(), literally(replace(case, correction="none")).whole()
    assert max(difference(corrected[name].double(), value.double()) for name, value in plain.items()) > 1e-5


@pytest.mark.parametrize("options", slow_but_for([{"clip": 0.3}], [{"clip": 0.3}, {"recompute": True}]), ids=str)
def test_a_correction_goes_with_clipping_and_recomputation(tmp_path: Path, options: dict[str, Any]) -> None:
    case = case_of("resnet", "1f1b-stashing", (2, 1), "adamw-fused")
    check(tmp_path, replace(case, correction="ef", **options))


QUICK_SHARDED = {("tied", "1f1b-flush", (1, 2)), ("chain", "2bw", (2, 1, 1))}


@pytest.mark.parametrize("corrected", [False, True], ids=["", "ef"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            replace(case, shards=True),
            marks=[] if (case.subject, case.schedule, case.replicas) in QUICK_SHARDED else pytest.mark.slow,
            id=name_of(case),
        )
        for case in every_case()
        if max(case.replicas) > 1
    ],
)
def test_an_optimiser_in_parts_equals_the_formula(tmp_path: Path, case: Case, corrected: bool) -> None:
    if corrected and case.schedule not in STALE:
        pytest.skip("nothing to correct")
    check(tmp_path, replace(case, correction="ef" if corrected else "none"))


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.3},
        {"replicas": (3, 2, 1), "depths": (2, 2, 1), "clip": 0.3, "correction": "ef"},
        pytest.param({"recompute": True}, marks=pytest.mark.slow),
        pytest.param({"replicas": (5,), "depths": (1,)}, marks=pytest.mark.slow),
        pytest.param({"flush_epochs": 1, "epochs": 3, "correction": "ef"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_optimiser_in_parts_goes_with_all_else(tmp_path: Path, options: dict[str, Any]) -> None:
    case = replace(case_of("chain", "1f1b-stashing", (2, 1), "adamw-fused"), shards=True, clip=None)
    check(tmp_path, replace(case, **options))


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [
        ("1f1b-stashing", (2, 1)),
        pytest.param("2bw", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("vertical-sync", (1, 2), marks=pytest.mark.slow),
        pytest.param("2bw", (2, 1), marks=pytest.mark.slow),
        pytest.param("1f1b-stashing", (2, 1, 1), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("correction", ["ef", pytest.param("none", marks=pytest.mark.slow)])
def test_a_synchronous_start_flushes_and_goes_on_without(
    tmp_path: Path, schedule: str, replicas: tuple[int, ...], correction: str
) -> None:
    case = case_of("chain", schedule, replicas, "sgd-fused")
    check(tmp_path, replace(case, epochs=3, flush_epochs=1, correction=correction))


@pytest.mark.parametrize("schedule", ONE_SCHEDULE)
@pytest.mark.parametrize(
    ("replicas", "accumulate", "samples"),
    [
        pytest.param((1, 1), 2, 30, marks=pytest.mark.slow),
        ((2, 1), 4, 3),
        ((3, 2, 1), 10, 71),
        pytest.param((1, 3), 4, 34, marks=pytest.mark.slow),
        pytest.param((2, 2), 5, 32, marks=pytest.mark.slow),
        pytest.param((1,), 2, 20, marks=pytest.mark.slow),
        pytest.param((2,), 3, 44, marks=pytest.mark.slow),
        pytest.param((3, 1), 6, 7, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_ratio_and_any_number_of_minibatches(
    tmp_path: Path, schedule: str, replicas: tuple[int, ...], accumulate: int, samples: int
) -> None:
    """Groups with one short member, replicas without a member, fewer minibatches than replicas, one stage alone."""
    case = case_of("chain", schedule, replicas, "sgd-fused", accumulate)
    check(tmp_path, replace(case, samples=samples, epochs=3))


@pytest.mark.parametrize("schedule", ONE_SCHEDULE)
def test_recomputation_changes_nothing(tmp_path: Path, schedule: str) -> None:
    check(tmp_path, replace(case_of("resnet", schedule, (2, 1), "sgd-fused"), recompute=True))


@pytest.mark.parametrize("schedule", slow_but_for(["1f1b-stashing"], (*ASYNCHRONOUS, "2bw", "gpipe", "1f1b-flush")))
def test_gradients_are_clipped_by_the_norm_that_is_said(tmp_path: Path, schedule: str) -> None:
    case = case_of("chain", schedule, (2, 1, 1), "sgd-fused")
    clipped = check(tmp_path, replace(case, clip=0.3)).whole()
    assert max(difference(clipped[name], value) for name, value in literally(case).whole().items()) > 1e-3


@pytest.mark.parametrize("schedule", slow_but_for(["1f1b-flush"], FLUSHED))
@pytest.mark.parametrize("subject", slow_but_for(["chain"], ("encoder-decoder", "chain", "tied")))
def test_a_flush_equals_one_process_on_the_whole_batch(tmp_path: Path, subject: str, schedule: str) -> None:
    """Where samples do not depend on each other, on all samples of an update at once."""
    case = replace(case_of(subject, schedule, (2, 1, 1), "sgd-foreach"), dropout=False)
    run = CaseRun(tmp_path, case)
    chosen = SUBJECTS[subject]
    arguments = chosen.build(dropout=False), chosen.data(case.samples), chosen.loss, OPTIMIZERS[case.optimizer]
    expected = train_on_whole_batches(*arguments, recipe_of(case))
    for replicas in run.left():
        for name, value in replicas[0]["parameters"].items():
            assert difference(value, expected[name]) <= RELATIVE, name


WEIGHTED = {
    ("1f1b-stashing", (2, 1)): "sgd-foreach",
    ("vertical-sync", (2, 1, 1)): "adamw-fused",
    ("2bw", (1, 2)): "sgd-fused",
    ("gpipe", (1, 1, 1)): "sgd-foreach",
    ("1f1b-flush", (2, 1)): "sgd-foreach",
    ("zb-h1", (1, 2)): "adamw-fused",
}
"""The optimiser by schedule and replicas."""


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [
        pytest.param(*key, marks=[] if key[0] in ("1f1b-stashing", "1f1b-flush", "zb-h1") else pytest.mark.slow)
        for key in WEIGHTED
    ],
)
def test_minibatches_count_by_their_weight(tmp_path: Path, schedule: str, replicas: tuple[int, ...]) -> None:
    """A loss over valid targets, of which some minibatches have none; each stage has groups of its own."""
    case = case_of("tagger", schedule, replicas, WEIGHTED[schedule, replicas])
    case = replace(case, transport="nccl" if schedule == "2bw" else "auto")
    weighted = check(tmp_path, case).whole()
    assert all(bool(value.isfinite().all()) for value in weighted.values())
    subject = ALL_SUBJECTS["tagger"]
    if schedule in FLUSHED:
        arguments = subject.build(False), subject.data(case.samples), subject.loss, OPTIMIZERS[case.optimizer]
        for name, value in train_on_whole_batches(*arguments, recipe_of(case)).items():
            assert difference(weighted[name], value) <= RELATIVE, name


@pytest.mark.parametrize("subject", slow_but_for(["chain"], SUBJECTS))
def test_the_formulas_can_be_told_apart(subject: str) -> None:
    """By a million times the tolerance: a version too new or too old at any stage would be noticed."""
    ordinary = case_of(subject, "1f1b-stashing", (2, 1), "sgd-fused")
    others = [replace(ordinary, schedule=schedule) for schedule in SCHEDULES if schedule not in ("gpipe", "zb-h1")]
    others += [replace(ordinary, depths=(3, 1)), replace(ordinary, depths=(2, 2)), replace(ordinary, seed=1)]
    left = [literally(case).whole() for case in others]
    for one, other in itertools.combinations(left, 2):
        assert max(difference(one[name].double(), other[name].double()) for name in one) > 1e6 * RELATIVE

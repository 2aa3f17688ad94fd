"""Checks what plan.json says about itself: its model, its configuration, its slowest resource, and why it was chosen.

Costs of a choice by time to the goal are computed again from the measured cases that plan.json lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from statistics import fmean

from pipeplan.checker.charged_pace import ChargedPace
from pipeplan.checker.document import FLUSHING, STASHING, CheckedOptions, CheckedStage, PlanDocument
from pipeplan.checker.figures import StageFigures
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node

TIME_TO_GOAL = "time-to-goal"
VERSION = re.compile(r"[0-9]+(\.[0-9]+){1,3}([-+.]?[a-z0-9]{1,16}){0,4}", re.ASCII)
"""Versions of pipeplan, as plan.json states the one that wrote it."""


def check_description(
    document: PlanDocument, profile: Profile, pace: ChargedPace, figures: Sequence[StageFigures]
) -> str:
    """Check the words, and return a summary. Raises an `InputError` that names the first field that is wrong."""
    if not VERSION.fullmatch(document.root["pipeplan"].text()):
        document.root["pipeplan"].fail("it is no version of pipeplan")
    _check_profile(document.root["profile"], profile)
    _check_options(document)
    plan = document.root["plan"]
    _expect(plan["config"], configuration(document.stages, document.copies))
    prediction = document.prediction
    _expect_one(prediction["bound_by"], pace.bound_by)
    batch = prediction.get("batch")
    if (batch is None) is (document.schedule in FLUSHING):
        prediction.fail(f"the parts of a batch, `batch`, do not go with the schedule {document.schedule}")
    return f"{plan['config'].text()}, bound by {prediction['bound_by'].text()}"


def configuration(stages: Sequence[CheckedStage], copies: int) -> str:
    """Replica counts from input to output, such as `15-1`, or `4×(1-1)` for four copies of a pipeline.

    Where workers run several stages, the counts are those of the devices: `8-8 × 2 stages`.
    """
    devices = tuple(dict.fromkeys(stage.workers for stage in stages))
    if len(devices) < len(stages):  # workers run several stages each
        return f"{'-'.join(str(len(workers)) for workers in devices)} × {len(stages) // len(devices)} stages"
    counts = "-".join(str(len(stage.workers) // copies) for stage in stages)
    return counts if copies == 1 else f"{copies}×({counts})"


def _check_profile(node: Node, profile: Profile) -> None:
    origin = profile.provenance
    for key, value in (("model", profile.model_name), ("ref", profile.model_ref), ("kind", origin.kind)):
        _expect(node[key], value)
    _expect(node["how"], origin.how)
    for key, count in (("minibatch", profile.minibatch), ("threads", origin.threads)):
        if node[key].integer() != count:
            node[key].fail(f"stated {node[key].value!r}, found {count}")


def _check_options(document: PlanDocument) -> None:
    """Raise an `InputError` where the options name another schedule than the plan has, or something unknown."""
    node = document.root["options"]
    known = {field.name for field in fields(CheckedOptions)}
    node.refuse_others({*known, "inference", "schedule", "accumulate", "several"})
    if (several := node.get("several")) is not None and several.boolean():
        several.fail("plan.json never asks for several stages by this option")
    inference, schedule, accumulate = node.get("inference"), node.get("schedule"), node.get("accumulate")
    if (inference.boolean() if inference else False) != document.inference:
        node.fail("`inference` is not that of the plan")
    # The options of a plan for inference keep the default of training, which does not count.
    if (schedule.text() if schedule else STASHING) != (STASHING if document.inference else document.schedule):
        node.fail("`schedule` is not that of the plan")
    if (accumulate.integer(minimum=1) if accumulate else None) != document.accumulate:
        node.fail("`accumulate` is not that of the plan")


def _expect(node: Node, found: str) -> None:
    if node.text() != found:
        raise InputError(f"{node.where}: stated {node.value!r}, found {found!r}")


def _expect_one(node: Node, found: Iterable[str]) -> None:
    if node.text() not in found:
        raise InputError(f"{node.where}: stated {node.value!r}, found {' or '.join(sorted(found))}")


def check_goal_choice(root: Node, same: Callable[[Node, float], None]) -> None:
    """Check a choice by time to the goal, if plan.json has one; `same` compares a stated figure with a computed one.

    Costs are recomputed from the measured cases that plan.json lists, with their source. Raises an `InputError`.
    """
    choice = root.get("choice")
    objective = None if choice is None else choice.get("objective")
    if choice is None or objective is None:
        return
    if objective.text() != TIME_TO_GOAL:
        objective.fail(f"there is no such objective: {objective.text()!r}")
    goals = {kind: _goal_sample_s(choice.get(kind), same) for kind in ("synchronous", "asynchronous")}
    taken = choice["taken"].text()
    if taken not in goals or choice.get(taken) is None:
        choice["taken"].fail("no such plan is stated")
    drained, stale = goals["synchronous"], goals["asynchronous"]
    gain = choice["asynchronous_gain"].number()
    # Where a cost is not measured, the choice is by the rate, and nothing follows from costs.
    if (
        drained is not None
        and stale is not None
        and taken == "asynchronous"
        and drained / stale - 1 < gain * (1 - 1e-9)
    ):
        choice["taken"].fail("the asynchronous plan does not reach the goal as much faster as was asked for")


def _goal_sample_s(node: Node | None, same: Callable[[Node, float], None]) -> float | None:
    """Seconds per sample times the cost of a stated plan; None where there is no plan, or its cost is not measured."""
    if node is None:
        return None
    stale, learning = not node["updates"]["synchronous"].boolean(), node.get("learning")
    if stale is not (learning is not None):
        node.fail("`learning` is stated of asynchronous plans, and of no other")
    cost = 1.0 if learning is None else _cost(learning, same)
    if cost is None:
        for key in ("goal_cost", "goal_sample_s"):
            if (stated := node.get(key)) is not None:
                stated.fail("it is stated, and the cases do not show it")
        return None
    goal_sample_s = node["minibatch_s"].number() / node["minibatch"].integer(minimum=1) * cost
    same(node["goal_cost"], cost)
    same(node["goal_sample_s"], goal_sample_s)
    return goal_sample_s


def _cost(learning: Node, same: Callable[[Node, float], None]) -> float | None:
    """Samples to the goal, from the cases; at least 1. None unless every seed of every case reaches the goal."""
    if not learning["source"].text():
        raise InputError(f"{learning.where}: the figures have no source")
    ratios = [case.get("samples_ratio") for case in learning["cases"].items()]
    known = [ratio.number() for ratio in ratios if ratio is not None]
    if not known or len(known) < len(ratios):
        if (stated := learning.get("samples_ratio")) is not None:
            stated.fail("it is stated, and the cases do not show it")
        return None
    same(learning["samples_ratio"], fmean(known))
    return max(1.0, fmean(known))

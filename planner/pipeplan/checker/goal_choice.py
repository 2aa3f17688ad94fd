"""Checks the choice by time to the goal that plan.json states: its costs, its products, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from pipeplan.errors import InputError
from pipeplan.util.files import Node

TIME_TO_GOAL = "time-to-goal"


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

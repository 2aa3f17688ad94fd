"""Microbatches in flight: trainers have a rule, where a plan counts on what its links need."""

from __future__ import annotations

from dataclasses import replace

from pipeplan.evaluate import evaluate
from pipeplan.exports.degrees import Degrees
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.units import show_time


def otherwise(problem: Problem, plan: Plan, found: Degrees) -> str:
    """What the 1F1B of others has in flight, and predicts, where that differs from the plan; empty if it does not.

    It is as many as there are stages from this one on, or all of an update if these are fewer.
    """
    theirs = [min(found.stages - index, found.microbatches) for index in range(found.stages)]
    ours = [min(stage.depth, found.microbatches) for stage in plan.stages]
    if ours == theirs:
        return ""
    stages = tuple(replace(stage, depth=depth) for stage, depth in zip(plan.stages, theirs, strict=True))
    own, other = (evaluate(one, problem).pace_s for one in (plan, replace(plan, stages=stages)))
    numbers = "-".join(map(str, theirs)), "-".join(map(str, ours))
    said = f"Microbatches in flight: {numbers[0]}, where the plan counts on {numbers[1]}"
    if show_time(own) == show_time(other):
        return f"{said}; the prediction is the same, {show_time(own)} each."
    return f"{said}; so the prediction is {show_time(other)} each, not {show_time(own)}."

"""Microbatches in flight: trainers have a rule, where a plan counts on what its links need."""

from __future__ import annotations

from pipeplan.evaluate import evaluate
from pipeplan.exports.degrees import Degrees
from pipeplan.links import Links
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.stages import stage_times
from pipeplan.units import show_time


def otherwise(problem: Problem, plan: Plan, found: Degrees) -> str:
    """What the 1F1B of others has in flight, and costs, where that differs from the plan; empty if it does not.

    It is as many as there are stages from this one on, or all of an update if these are fewer.
    """
    theirs = [min(found.stages - index, found.microbatches) for index in range(found.stages)]
    ours = [min(stage.depth, found.microbatches) for stage in plan.stages]
    if ours == theirs:
        return ""
    numbers = "-".join(map(str, theirs)), "-".join(map(str, ours))
    said = f"Microbatches in flight: {numbers[0]}, where the plan counts on {numbers[1]}"
    predicted, least = evaluate(plan, problem).pace_s, _least_s(problem, plan, found, theirs)
    if least <= predicted or show_time(least) == show_time(predicted):
        return f"{said}; this may be slower than the prediction of {show_time(predicted)} each."
    return f"{said}; so each takes {show_time(least)} or more, not {show_time(predicted)} as predicted."


def _least_s(problem: Problem, plan: Plan, found: Degrees, in_flight: list[int]) -> float:
    """Seconds a microbatch, at least, by Little's law.

    A microbatch is in flight at a stage while it passes all stages from there on, and all boundaries, forth and back.
    """
    links, latency, least = Links.of(problem.cluster), 0.0, 0.0
    for index in reversed(range(found.stages)):
        times = stage_times(plan, problem, links, index)
        latency += times.pass_s + times.round_trip_s
        least = max(least, latency / in_flight[index] / found.replicas)
    return least

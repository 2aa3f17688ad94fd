"""Microbatches in flight: other trainers have a fixed rule, whereas a plan chooses as many as its links need."""

from __future__ import annotations

from pipeplan.evaluate import evaluate
from pipeplan.exports.degrees import Degrees
from pipeplan.links import Links
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.stages import stage_times
from pipeplan.units import show_time


def otherwise(problem: Problem, plan: Plan, grid: Degrees) -> str:
    """A sentence on the microbatches in flight of the usual 1F1B, and on their cost; empty if the plan has the same.

    The usual 1F1B has as many in flight as there are stages from this one on, and at most those of one update.
    """
    theirs = [min(grid.stages - index, grid.microbatches) for index in range(grid.stages)]
    ours = [min(stage.depth, grid.microbatches) for stage in plan.stages]
    if ours == theirs:
        return ""
    numbers = "-".join(map(str, theirs)), "-".join(map(str, ours))
    difference = f"Microbatches in flight: {numbers[0]}, where the plan counts on {numbers[1]}"
    predicted, least = evaluate(plan, problem).pace_s, _least_s(problem, plan, grid, theirs)
    if least <= predicted or show_time(least) == show_time(predicted):
        return f"{difference}; this may be slower than the prediction of {show_time(predicted)} each."
    return f"{difference}; so each takes {show_time(least)} or more, not {show_time(predicted)} as predicted."


def _least_s(problem: Problem, plan: Plan, grid: Degrees, in_flight: list[int]) -> float:
    """Lower bound on the seconds per microbatch, by Little's law: latency divided by microbatches in flight.

    A microbatch is in flight at a stage while it passes forward and backward through all later stages and boundaries.
    """
    links, latency, least = Links.of(problem.cluster), 0.0, 0.0
    for index in reversed(range(grid.stages)):
        times = stage_times(plan, problem, links, index)
        latency += times.pass_s + times.round_trip_s
        least = max(least, latency / in_flight[index] / grid.replicas)
    return least

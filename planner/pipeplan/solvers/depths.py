"""Gives the stages of a plan the in-flight depths that keep a pace."""

from __future__ import annotations

from dataclasses import replace

from pipeplan import cost
from pipeplan.links import Links
from pipeplan.plan import Plan, versions
from pipeplan.problem import Problem
from pipeplan.stages import crossing_bytes, group_allreduce_time


def assign(plan: Plan, problem: Problem, pace_s: float) -> Plan:
    """The plan with, from the last stage to the first, the smallest depths that sustain one minibatch per `pace_s`."""
    if plan.inference:
        return plan
    links = Links.of(problem.cluster)
    inner_pace = pace_s * plan.copies
    stages = list(plan.stages)
    stages[-1] = replace(stages[-1], depth=1)
    for index in range(len(stages) - 2, -1, -1):
        workers = [worker for stage in plan.copy(0)[index : index + 2] for worker in stage]
        busier = max(crossing_bytes(problem, plan, index))
        transfer = cost.transfer_time(busier, *links.sendrecv_among(workers))
        following, here = stages[index + 1], stages[index]
        waits = [
            cost.group_wait(
                group_allreduce_time(plan, problem, links, number),
                inner_pace,
                stage.replicas // plan.copies,
                plan.copies,
            )
            for number, stage in ((index, here), (index + 1, following))
        ]
        behind = cost.in_flight_behind(following.depth, following.replicas // plan.copies, waits[1])
        replicas = here.replicas // plan.copies
        depth = int(cost.in_flight_depth(behind, waits[0], float(transfer), inner_pace, replicas))
        stages[index] = replace(here, depth=depth)
    stages = [replace(stage, versions=versions(stage.depth, plan.lag(i), False)) for i, stage in enumerate(stages)]
    return replace(plan, stages=tuple(stages))

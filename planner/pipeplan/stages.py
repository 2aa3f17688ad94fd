"""What the stages of a plan hold and exchange: units, bytes across cuts, all-reduces of gradients."""

from __future__ import annotations

from pipeplan import cost
from pipeplan.links import Links
from pipeplan.plan import Plan, Stage
from pipeplan.problem import Problem


def units_of(problem: Problem, stage: Stage) -> list[int]:
    """The units that a stage holds, by index."""
    names = set(stage.layers)
    return [index for index, unit in enumerate(problem.units) if unit.layers[0] in names]


def crossing_bytes(problem: Problem, plan: Plan, index: int) -> tuple[int, int]:
    """Bytes of one minibatch that cross the cut behind stage `index`, forward and backward; each tensor once."""
    before = {unit for stage in plan.stages[: index + 1] for unit in units_of(problem, stage)}
    crossing = [
        flow for flow in problem.flows if flow.producer in before and any(unit not in before for unit in flow.consumers)
    ]
    return sum(flow.bytes for flow in crossing), sum(flow.gradient_bytes for flow in crossing)


def group_allreduce_time(plan: Plan, problem: Problem, links: Links, index: int) -> float:
    """Seconds of one all-reduce among all replicas of a stage, as the executor does it after every group."""
    stage = plan.stages[index]
    if stage.replicas == 1 or plan.inference:
        return 0.0
    size = sum(problem.units[unit].parameter_bytes for unit in units_of(problem, stage))
    bandwidth, latency = links.allreduce_among(stage.workers)
    return float(cost.ring_allreduce_time(stage.replicas, size, bandwidth, latency))

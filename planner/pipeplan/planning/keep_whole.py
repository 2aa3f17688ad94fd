"""Moves the stages of a plan so that servers are kept whole and idle workers come last, where that costs little.

A stage within one server is simpler than one that straddles two, and workers that stay idle are easier to give to
somebody else where they are the last ones. The stages keep their layers, their replicas and their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.stage_times import grid_shape_of
from pipeplan.plan.plan import Plan
from pipeplan.planning.charge_results import TOLERANCE
from pipeplan.problem.problem import Problem


def kept_whole(plan: Plan, problem: Problem, limit_s: float) -> tuple[Plan, Evaluation]:
    """The plan with its stages on the workers that are simplest, and its score.

    Fewer servers in a stage may make the plan slower, up to the pace `limit_s`; where the stages are in as many servers
    as before, only equally fast placements are taken. A plan with copies stays as it is, because each copy already
    lies in a component of its own; so does a uniform grid that would no longer be one.
    """
    best, score = plan, evaluate(plan, problem)
    if plan.copies > 1:
        return best, score
    own_s, servers, is_grid = score.pace_s, _servers(plan, problem.cluster), bool(grid_shape_of(plan, problem.cluster))
    for moved in _placements(plan, problem.cluster):
        if (_servers(moved, problem.cluster), _last(moved)) >= (_servers(best, problem.cluster), _last(best)):
            continue
        sized = depths.assign_depths(moved, problem, own_s * (1 + 1e-12))
        found = evaluate(sized, problem)
        most_s = limit_s if _servers(moved, problem.cluster) < servers else own_s * (1 + TOLERANCE)
        fits = found.fits or not problem.options.memory
        if found.pace_s <= most_s and fits and bool(grid_shape_of(sized, problem.cluster)) >= is_grid:
            best, score = sized, found
    return best, score


def _placements(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """The stages on consecutive workers from the first one on, with and without a skip to the next server."""
    for skips in (True, False):
        stages, first = [], 0
        for stage in plan.stages:
            following = next(start for start in cluster.starts(cluster.server_level) if start >= first)
            if skips and following + stage.replicas <= cluster.workers:
                here, there = (_touched(begin, stage.replicas, cluster) for begin in (first, following))
                first = following if there < here else first
            end = first + stage.replicas
            stages.append(replace(stage, workers=tuple(range(first, end))))
            first = end
        if first <= cluster.workers:
            yield replace(plan, stages=tuple(stages))


def _touched(first: int, count: int, cluster: Cluster) -> int:
    """The number of servers that hold so many consecutive workers."""
    return cluster.server_of(first + count - 1) - cluster.server_of(first) + 1


def _servers(plan: Plan, cluster: Cluster) -> int:
    """The number of servers of each stage, summed over stages."""
    return sum(len({cluster.server_of(worker) for worker in stage.workers}) for stage in plan.stages)


def _last(plan: Plan) -> int:
    return max(max(stage.workers) for stage in plan.stages)

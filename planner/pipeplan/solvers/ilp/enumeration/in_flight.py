"""Tells which choices of stages fit in memory with what is in flight behind them, on a path from input to output.

Memory grows with the depth, and the depth with what is in flight behind a stage. Of all paths behind a pair of a set
and a worker, the least that is in flight bounds the depth of a stage in front of it. The other way round, of all paths
in front of a pair, the largest depth that fits bounds what may be in flight behind it.

Under vertical sync the weight versions of a stage follow from what the input stage has under way, which comes last. The
least that any input stage has under way excludes choices, and those excluded raise that least, until nothing changes;
then the same for the input stages of each number of replicas by themselves.
"""

from __future__ import annotations

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan.schedules import VERTICAL, update_lag
from pipeplan.solvers.ilp.enumeration.closed_sets import Flags, Floats, Ints
from pipeplan.solvers.ilp.enumeration.stage_fit import StageFit
from pipeplan.solvers.ilp.enumeration.stage_memory import Stages
from pipeplan.solvers.ilp.facts.placement_facts import Place
from pipeplan.util.deadline import Deadline


def fitting(fit: StageFit, stages: Stages, deadline: Deadline) -> Flags:
    """Tell which choices fit in memory on a path from them to the output."""
    options = fit.facts.problem.options
    kept, depth = _to_the_output(fit, stages, None)
    kept[kept] = _from_the_input(fit, stages.take(kept), depth[kept])[0]
    if options.schedule != VERTICAL or not options.memory or not fit.facts.problem.training:
        return kept
    left = _settled(fit, stages, np.flatnonzero(kept), depth, deadline)
    flags = np.zeros(len(stages.place), dtype=bool)
    first = (stages.begin[left] == 0) & (stages.end[left] < fit.last)
    only = (stages.begin[left] == 0) & (stages.end[left] == fit.last)
    flags[left[only]] = True
    replicas = fit.table.replicas[stages.place[left]]
    for count in np.unique(replicas[first]).tolist():
        deadline.check()
        mine = left[~only & (~first | (replicas == count))]
        flags[_settled(fit, stages, mine, None, deadline)] = True
    return flags


def depth_ranges(fit: StageFit, stages: Stages, pace_s: float) -> dict[Place, tuple[float, float]]:
    """The least depth of the stages on every place, and the largest that fits and is of use, at this pace or a slower
    one."""
    count = len(fit.table.places)
    _, least = _to_the_output(fit, stages, None)
    _, most = _from_the_input(fit, stages, least)
    low, high = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(low, stages.place, least)
    np.maximum.at(high, stages.place, _most(fit, stages, most, pace_s))
    return {fit.table.places[place]: (low[place], high[place]) for place in np.unique(stages.place).tolist()}


def _most(fit: StageFit, stages: Stages, most: Floats, pace_s: float) -> Floats:
    """The largest depths that choices can need at this pace, of all paths behind them, and `most` at the most."""
    in_flight = np.full((len(fit.sets), fit.facts.workers + 1), -np.inf)
    in_flight[len(fit.sets) - 1] = 0.0
    stop = fit.table.stop[stages.place]
    most = most.copy()
    for worker, mine in reversed(list(enumerate(fit.table.by_worker(stages.place)))):
        in_flight[:, worker] = np.maximum(in_flight[:, worker], in_flight[:, worker + 1])
        here = stages.take(mine)
        behind = np.maximum(0.0, in_flight[here.end, stop[mine]])
        depth, wait = fit.deepest(here, behind, pace_s)
        most[mine] = np.minimum(most[mine], depth)
        asked = formulas.in_flight_behind(most[mine], fit.table.replicas[here.place], wait)
        np.maximum.at(in_flight[:, worker], here.begin, asked)
    return most


def _settled(fit: StageFit, stages: Stages, left: Ints, depth: Floats | None, deadline: Deadline) -> Ints:
    """The choices, of those `left`, that fit with the versions that the input stages among them ask for at least.

    `depth` has the least depths of all choices, where they are known.
    """
    if depth is None:
        kept, found = _to_the_output(fit, stages.take(left), None)
        depth = np.zeros(len(stages.place))
        depth[left] = found
        left = left[kept]
    while len(left):
        deadline.check()
        under_way = _under_way(fit, stages, left, depth)
        if under_way is None:
            break
        kept, found = _to_the_output(fit, stages.take(left), under_way)
        depth[left] = found
        if kept.all():
            break
        left = left[kept]
    return left


def _under_way(fit: StageFit, stages: Stages, left: Ints, depth: Floats) -> Floats | None:
    """By number of replicas of a stage, the least that the input stages have under way since, less the first version:
    (d₁ + lag) r₁ - gcd(r₁, r), as in `schedules.vertical_versions`. None where all have all layers."""
    mine = left[(stages.begin[left] == 0) & (stages.end[left] < fit.last)]
    if not len(mine):
        return None
    replicas = fit.table.replicas[stages.place[mine]]
    started = (depth[mine] + update_lag(replicas * fit.facts.problem.copies, False)) * replicas
    least = np.full(fit.facts.workers + 1, np.inf)
    np.minimum.at(least, replicas, started)
    counts = np.flatnonzero(np.isfinite(least))
    every = np.arange(fit.facts.workers + 1)
    return np.asarray((least[counts][:, None] - np.gcd(counts[:, None], every)).min(axis=0))


def _from_the_input(fit: StageFit, stages: Stages, least: Floats) -> tuple[Flags, Floats]:
    """Tell which choices have depths of at least `least` that fit in memory, and are covered by the largest that fit on
    a path in front of them; and the most that each may have."""
    allowed = np.full((len(fit.sets), fit.facts.workers + 1), -np.inf)
    allowed[0] = np.inf
    stop = fit.table.stop[stages.place]
    most = np.minimum(fit.most_depth(stages), fit.most_in_time(stages))
    kept = np.zeros(len(stages.place), dtype=bool)
    for worker, mine in enumerate(fit.table.by_worker(stages.place)):
        here = stages.take(mine)
        most[mine] = np.minimum(most[mine], fit.depth_of(here, allowed[here.begin, worker]))
        kept[mine] = most[mine] >= least[mine]
        row = mine.start + np.flatnonzero(kept[mine])
        np.maximum.at(allowed, (stages.end[row], stop[row]), fit.covered(stages.take(row), most[row]))
        allowed[:, worker + 1] = np.maximum(allowed[:, worker + 1], allowed[:, worker])
    return kept, most


def _to_the_output(fit: StageFit, stages: Stages, under_way: Floats | None) -> tuple[Flags, Floats]:
    """Tell which choices fit in memory with the least in flight behind them, on a path to all layers, and their
    depths."""
    in_flight = np.full((len(fit.sets), fit.facts.workers + 1), np.inf)
    in_flight[len(fit.sets) - 1] = 0.0
    stop = fit.table.stop[stages.place]
    kept, depths = np.zeros(len(stages.place), dtype=bool), np.zeros(len(stages.place))
    for worker, mine in reversed(list(enumerate(fit.table.by_worker(stages.place)))):
        in_flight[:, worker] = np.minimum(in_flight[:, worker], in_flight[:, worker + 1])
        behind = in_flight[stages.end[mine], stop[mine]]
        row = mine.start + np.flatnonzero(np.isfinite(behind))
        if not len(row):
            continue
        here = stages.take(row)
        depth, asked = fit.depths(here, behind[row - mine.start])
        held = fit.holds(here, depth, under_way)
        kept[row], depths[row] = held, depth
        np.minimum.at(in_flight[:, worker], here.begin[held], asked[held])
    return kept, depths

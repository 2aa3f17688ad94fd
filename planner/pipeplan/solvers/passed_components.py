"""A lower bound on the step time of pipelines that pass through servers or racks, including contention for their cards.

If a stage lies wholly inside a component of a level, every minibatch visits that component. If neither the first nor
the last stage has a worker there, the minibatch's activations and gradients both leave the component through the same
card in the same direction. Sending them takes

    P = (least bytes sent over a cut + least bytes returned over a cut) / bandwidth of the card

At a smaller step time T < P such components contain no whole stage. So every stage that does not straddle components
lies in one of two components: where the first stage ends, or where the last stage begins. A stage of w bytes that
straddles components on r workers sends its ring over a card: 2 (r-1)/r² · w/B ≤ T. If layers have at most ρ seconds of
work per byte, the work of this stage is at most

    ρ w ≤ T · β (r + 1 + 1/(r-1)) ≤ T · β (r + 2),   β = ρ B / 2

At most one such stage lies across each edge between components. So D workers in components of S workers do at most the
work of

    E = 2 S + β (D - 2 S + 2 (D / S - 1))

workers. The step time of a pipeline is at least the smaller of P and all work on E workers. The bound holds if stages
synchronise once per group of their replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeplan.cluster_data.links import Links
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem

_NOTHING = 1e-6
"""A tiny efficiency for all-reduces over links that no stage should use."""


@dataclass(frozen=True)
class PassedLevel:
    """A level of the cluster whose components a pipeline may pass through."""

    level: int
    bound_s: float
    """Lower bound on the step time of every single pipeline, in seconds per minibatch."""
    crossing_s: float
    """P, the smallest step time at which a pipeline may pass through a component, in seconds per minibatch."""


def passed_levels(problem: Problem, cuts: Cuts) -> list[PassedLevel]:
    """The levels of a problem for which this module has a bound."""
    options, cluster = problem.options, problem.cluster
    grouped = problem.training and not options.flushes and problem.minibatches_in_flight is None
    if not (options.contention and grouped and cluster.uniform) or len(cuts.ideals) < 3:
        return []
    # Units without parameters may be in stages that straddle components at no cost.
    units = [
        (unit.forward_s + unit.backward_s, unit.parameter_bytes) for unit in problem.units if unit.parameter_bytes > 0
    ]
    if not units:
        return []
    work_s, speed, total = sum(work for work, _ in units), cluster.device.speed, cluster.workers
    densest = max(work / size for work, size in units) / speed
    crossing = float(cuts.sent[1:-1].min() + cuts.returned[1:-1].min())
    links, found = Links.of(cluster), []
    for level in range(1, len(cluster.levels)):
        size, (message, ring) = cluster.span(level), links.card(level, 0)
        if 1 < size < total and np.isfinite(message) and np.isfinite(ring):
            share = densest * ring / 2
            most = 2 * size + share * (total - 2 * size + 2 * (total // size - 1))
            most_s = work_s / speed / min(total, max(most, 2 * size))
            found.append(PassedLevel(level, min(crossing / message, most_s), crossing / message))
    return found


def without_straddling(problem: Problem, level: int) -> Problem:
    """The problem with all-reduces so slow between components of a level that no stage straddles components."""
    levels = problem.cluster.levels
    above = tuple(replace(one, allreduce_efficiency=_NOTHING) for one in levels[level:])
    return problem.within(replace(problem.cluster, levels=(*levels[:level], *above)))

"""A lower bound on the step time of pipelines that pass through servers or racks, with everything charged that these
share.

Where a stage lies wholly inside a component of a level, every minibatch visits that component. If neither the first nor
the last stage has a worker there, its activations leave the component and its gradients do, by the same card in the
same direction, which takes

    P = (least bytes sent over a cut + least bytes returned over one) / bandwidth of the card

Below that step time such components hold no whole stage. So all stages but those that straddle components lie in two of
them, that where the first stage ends and that where the last one begins. A stage of w bytes that straddles on r workers
sends its ring over a card: 2 (r-1)/r² · w/B ≤ T, so that with at most ρ seconds of work for a byte it does no more than

    ρ w ≤ T · β (r + 1 + 1/(r-1)) ≤ T · β (r + 2),   β = ρ B / 2

As there is at most one such stage for each edge between components, D workers in components of S do at most the work of

    E = 2 S + β (D - 2 S + 2 (D / S - 1))

workers. A pipeline below the step time P takes at least all work on these. It all holds where stages synchronise once
for a group of their replicas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeplan.cluster_data.links import Links
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem

_NOTHING = 1e-6
"""The least efficiency, for all-reduces over links that no stage is to use."""


@dataclass(frozen=True)
class PassedLevel:
    """A level whose components pipelines pass through."""

    level: int
    bound_s: float
    """Lower bound on the step time of every single pipeline, in seconds per minibatch."""
    crossing_s: float
    """P, the step time at which components may be passed through."""


def passed_levels(problem: Problem, cuts: Cuts) -> list[PassedLevel]:
    """The levels of a problem for which something is known of pipelines that pass through."""
    options, cluster = problem.options, problem.cluster
    grouped = problem.training and not options.flushes and problem.minibatches_in_flight is None
    if not (options.contention and grouped and cluster.uniform) or len(cuts.ideals) < 3:
        return []
    # Units without parameters may be in stages that straddle for nothing.
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
    """The problem where no stage straddles components of a level, as all-reduces between them take too long."""
    levels = problem.cluster.levels
    above = tuple(replace(one, allreduce_efficiency=_NOTHING) for one in levels[level:])
    return problem.within(replace(problem.cluster, levels=(*levels[:level], *above)))

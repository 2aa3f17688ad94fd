"""Constraints (6) and (7) of the integer program: the links between stages that follow each other.

`integer_program` has the notation.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import NamedTuple

from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.constraints.placement_model import PlacementModel
from pipeplan.solvers.ilp.enumeration.choices import Choices
from pipeplan.solvers.ilp.facts.placements import Placement
from pipeplan.solvers.ilp.milp.linear_program import Term, Variable
from pipeplan.util.deadline import Deadline


class Hop(NamedTuple):
    """The connection of two stages: its level, and the bandwidth and latency of the slowest links on the way."""

    level: int
    bandwidth: float
    latency_s: float


class BoundaryModel(PlacementModel):
    """Stages on placements, with the links that the boundaries between them take.

    `charge_boundaries` adds what they contribute to the objective of the schedules without a flush.
    """

    def __init__(
        self, problem: Problem, floor_s: float, upper_s: float, deadline: Deadline, choices: Choices | None
    ) -> None:
        super().__init__(problem, floor_s, upper_s, deadline, choices)
        self.hops: list[Hop] = []
        """The connection of two stages, for each index in the keys of `level` and `carried`."""
        self.level = self._levels()
        self.carried: dict[tuple[int, int, int], list[Variable]] = {}
        """Time e of the traffic over every cut, by (cut, hop, links) and direction; the objective fills it in."""

    # -- constraint (6) --

    def _levels(self) -> dict[tuple[int, int, int], Variable]:
        """Add (6). Returns λ by (cut, hop, links), for levels with a larger component than the level below."""
        variables = {}
        for cut in range(self.workers - 1):
            most = self._most_links(cut)
            for hop in [hop for level, first, _ in self._components(cut) for hop in self._hops(cut, level, first)]:
                for links in range(1, most + 1):
                    variables[cut, hop, links] = self.program.number(f"l_{cut}_{hop}_{links}", 0, 1)
            mine = {key: variable for key, variable in variables.items() if key[0] == cut}
            self._bound_levels(cut, mine)
            if not self.problem.cluster.uniform:
                self._bound_rates(cut, mine)
            for links in range(2, most + 1):
                self._bound_links(cut, [(variable, 1.0) for key, variable in mine.items() if key[2] >= links], links)
        return variables

    def _hops(self, cut: int, level: int, first: int) -> list[int]:
        """The hops that a boundary over a cut may be in a component, by index: one for each pair of rates.

        The component is of this level and begins at worker `first`.
        """
        over, behind = self._sides(cut)
        within = [placement for placement in over if placement.start >= first] or [Placement(cut, 1, cut)]
        ends = {self.way(placement.workers, level) for placement in within}
        # Inside a placement the links of the stage behind it do not matter.
        others = {(math.inf, 0.0), *(self.way(placement.workers, level) for placement in behind)}
        rates = {(min(one[0], other[0]), max(one[1], other[1])) for one, other in itertools.product(ends, others)}
        hops = [Hop(level, *pair) for pair in sorted(rates)]
        self.hops += [hop for hop in hops if hop not in self.hops]
        return [self.hops.index(hop) for hop in hops]

    def _sides(self, cut: int) -> tuple[list[Placement], list[Placement]]:
        """The placements that hold the worker before a cut, and those that start behind it."""
        if self.problem.cluster.uniform:
            # All have the same links.
            return [Placement(cut, 1, cut)], []
        behind = [placement for placement in self.placements.all if placement.start == cut + 1]
        return self.covering(cut) or [Placement(cut, 1, cut)], behind

    def _bound_rates(self, cut: int, mine: dict[tuple[int, int, int], Variable]) -> None:
        """Add the part of (6) for servers that differ: the links of both stages must be as fast as the hop."""
        over, behind = self._sides(cut)
        for (_, number, _), variable in mine.items():
            hop = self.hops[number]

            def quick(placement: Placement, hop: Hop = hop) -> bool:
                bandwidth, latency_s = self.way(placement.workers, hop.level)
                return bandwidth >= hop.bandwidth and latency_s <= hop.latency_s

            over = [placement for placement in over if placement in self.used]
            if not all(quick(placement) for placement in over):
                self.program.at_most([(variable, 1.0), *self.in_use(filter(quick, over), -1.0)])
            slow = [placement for placement in behind if not quick(placement)]
            if slow:
                self.program.at_most([(variable, 1.0), *self.in_use(slow)], 1.0)

    def _most_links(self, cut: int) -> int:
        """The most links of the boundary behind any placement that holds the worker before the cut."""
        if not self.parallel:
            return 1
        return max(
            (min(placement.replicas, max(1, self.workers - 1 - placement.end)) for placement in self.covering(cut)),
            default=1,
        )

    def _components(self, worker: int) -> list[tuple[int, int, int]]:
        """The components that hold a worker and the next one: level, first worker, one past the last worker."""
        cluster, components = self.problem.cluster, [(0, worker, worker + 1)]
        for level in range(1, len(cluster.levels) + 1):
            component = cluster.component(level, worker)
            first, stop = cluster.starts(level)[component], cluster.starts(level)[component + 1]
            if (first, stop) != components[-1][1:]:
                components.append((level, first, stop))
        return components[1:]

    def _bound_levels(self, cut: int, mine: dict[tuple[int, int, int], Variable]) -> None:
        """Add (6) for one cut, whose variables λ are `mine`."""
        covering = self.covering(cut)
        final = self.in_use(placement for placement in covering if self.placements.final(placement))
        self.program.equal([*((variable, 1.0) for variable in mine.values()), *final], 1.0)
        for level, first, stop in self._components(cut)[:-1]:
            inside = [(variable, 1.0) for key, variable in mine.items() if self.hops[key[1]].level <= level]
            over_cut = self.in_use(
                (placement for placement in covering if placement.start >= first and placement.end < stop - 1), -1.0
            )
            behind_cut = self.in_use(
                (placement for placement in self.placements.all if placement.start > cut and placement.last < stop),
                -1.0,
            )
            self.program.at_most([*inside, *over_cut])
            self.program.at_most([*inside, *behind_cut])

    def _bound_links(self, cut: int, many: list[Term], links: int) -> None:
        """Add the part of (6) for parallel boundaries: so many links take as many replicas on both sides."""
        enough = self.in_use((placement for placement in self.covering(cut) if placement.replicas >= links), -1.0)
        fewer = self.in_use(
            placement for placement in self.placements.all if placement.start == cut + 1 and placement.replicas < links
        )
        self.program.at_most([*many, *enough])
        self.program.at_most([*many, *fewer], 1.0)

    # -- constraint (7) --

    def charge_boundaries(self) -> dict[tuple[int, int, int], list[Variable]]:
        """Add (7). Returns e, the time of the traffic over every cut, by (cut, hop, links) and direction."""
        carried: dict[tuple[int, int, int], list[Variable]] = defaultdict(list)
        for cut in range(self.workers - 1):
            mine = [key for key in self.level if key[0] == cut]
            rates = {key: key[2] * self.hops[key[1]].bandwidth for key in mine}
            slowest = min(rates.values())
            for number, sizes in enumerate(self.layers.directions()):
                crossing = [
                    (self.crossing[k, cut], size / (slowest * self.unit_s)) for k, size in enumerate(sizes) if size
                ]
                times = {key: self.program.number(f"e_{cut}_{key[1]}_{key[2]}_{number}") for key in mine}
                self.program.equal([*crossing, *((times[key], -rate / slowest) for key, rate in rates.items())])
                self.program.at_most([*((time, 1.0) for time in times.values()), (self.pace, -1.0)])
                for key, time in times.items():
                    self.program.at_most([(time, 1.0), (self.level[key], -1.0)])
                    carried[key].append(time)
        return carried

"""The integer program of one copy of the pipeline, over columns. `integer_program` has the notation and the numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.plan.plan import Stage
from pipeplan.plan.schedules import ACCUMULATING, GPIPE, TRAITS, VERTICAL
from pipeplan.solvers.ilp.backend import LinearProgram, Term, Variable, solution_value
from pipeplan.solvers.ilp.columns import ColumnFactory, Columns
from pipeplan.solvers.ilp.enumeration import TooManyColumnsError, older_versions
from pipeplan.solvers.ilp.places import Card, Floats
from pipeplan.util.deadline import Deadline

MOST_COLUMNS = 40_000
"""Largest number of columns and of boundaries of a program. Building such a program takes a few seconds."""

Node = tuple[int, int]
"""A cut, and a place that represents all places with the same boundary at this cut."""


@dataclass(frozen=True)
class ProgramLimits:
    """Bounds on the times of the plans that a program describes, in seconds, as in `integer_program`."""

    low_s: float
    """Lower bound on T."""
    high_s: float
    """Upper bound on T."""
    floor_s: float
    """Lower bound on C."""
    step_time_s: float
    """Upper bound on C."""


class ColumnProgram:
    """The program with given columns. The program has depths if the columns have them."""

    def __init__(
        self, factory: ColumnFactory, columns: Columns, limits: ProgramLimits, deadline: Deadline, *, deep: bool
    ) -> None:
        """Build the program. Raises `TooManyColumnsError` and `OutOfTime`."""
        if len(columns) > MOST_COLUMNS:
            raise TooManyColumnsError(f"it would have {len(columns):,} columns")
        self.factory, self.columns, self.limits, self.deep = factory, columns, limits, deep
        self.places, self.problem, self.options = factory.places, factory.problem, factory.problem.options
        self.program = LinearProgram(deadline)
        self.taken = [self.program.binary(f"y_{number}") for number in range(len(columns))]
        self.time = self.program.number("T", min(1.0, limits.low_s / limits.high_s * _ROOM), 1.0)
        self.step_time = self.program.number("C", min(1.0, limits.floor_s / limits.step_time_s * _ROOM), 1.0)
        self.program.minimise([(self.step_time, 1.0)])
        self.starting: list[list[int]] = [[] for _ in range(self.places.workers)]
        for number, start in enumerate(self.places.start[columns.place].tolist()):
            self.starting[start].append(number)
        self.boundaries: list[_Boundary] = []
        self._chain()
        self._join_copies()
        if self.options.flushes:
            self._charge_batch()
        else:
            self._charge_steady()
        if self.factory.whole.options.contention:
            self._charge_cards()
            self._charge_cores()
        self._add_user_constraints()
        if deep and self.options.schedule == VERTICAL:
            self._keep_versions()

    def _sum(self, numbers: Iterable[int], amounts: Sequence[float] | Floats | None = None) -> list[Term]:
        if amounts is None:
            return [(self.taken[number], 1.0) for number in numbers]
        return [(self.taken[number], float(amounts[number])) for number in numbers if amounts[number]]

    # -- (1) and (2): a chain of columns --

    def _chain(self) -> None:
        """Add constraint (1), and constraint (2) at every cut."""
        columns, last = self.columns, self.factory.last
        before, behind = self.places.before[columns.place].tolist(), self.places.behind[columns.place].tolist()
        ending: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        beginning: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        first = []
        for number, (begin, end) in enumerate(zip(columns.begin.tolist(), columns.end.tolist(), strict=True)):
            if begin == 0:
                first.append(number)
            else:
                beginning[begin][behind[number]].append(number)
            if end < last:
                ending[end][before[number]].append(number)
        self.program.equal(self._sum(first), 1.0)
        for cut in sorted({*ending, *beginning}):
            self._join(cut, ending[cut], beginning[cut])

    def _join(self, cut: int, ending: dict[int, list[int]], beginning: dict[int, list[int]]) -> None:
        leaving: dict[int, list[_Boundary]] = {place: [] for place in ending}
        entering: dict[int, list[_Boundary]] = {place: [] for place in beginning}
        by_start: dict[int, list[int]] = defaultdict(list)
        for place in beginning:
            by_start[int(self.places.start[place])].append(place)
        for place in ending:
            for start in self.places.starts_behind(int(self.places.stop[place])):
                for other in by_start.get(start, ()):
                    if start > self.places.stop[place] and self.places.movable[other]:
                        continue
                    if (found := self._boundary(cut, place, other)) is not None:
                        leaving[place].append(found)
                        entering[other].append(found)
                        self.boundaries.append(found)
        if len(self.boundaries) > MOST_COLUMNS:
            raise TooManyColumnsError(f"it would have more than {MOST_COLUMNS:,} boundaries")
        for numbers, boundaries in (
            *((ending[place], leaving[place]) for place in ending),
            *((beginning[place], entering[place]) for place in beginning),
        ):
            self.program.equal([*self._sum(numbers), *((boundary.taken, -1.0) for boundary in boundaries)])
        if self.deep and self.options.schedule != GPIPE and self.problem.training:
            self._cover(ending, leaving, beginning, entering)

    def _boundary(self, cut: int, before: int, behind: int) -> _Boundary | None:
        """The boundary between stages on two places; None if its traffic takes longer than the upper bound on T."""
        cuts = self.factory.cuts
        sent, returned = float(cuts.sent[cut]), float(cuts.returned[cut])
        rate, latency_s, links = self.places.boundary(before, behind)
        each = formulas.boundary_time(max(sent, returned), rate)
        counts = not (self.options.flushes and self.options.contention)
        rounds = float(self.factory.minibatches or 1) if self.options.flushes else 1.0
        busy = float(formulas.flush_busy(each, rounds, links)) if self.options.flushes else float(each / links)
        if counts and busy > self.limits.high_s * (1 + formulas.ROUNDING):
            return None
        cards = self._cards_of(before, behind, sent, returned) if self.options.contention else {}
        if max(cards.values(), default=0.0) > 1 + formulas.ROUNDING:
            return None
        return _Boundary(
            taken=self.program.number(f"x_{cut}_{before}_{behind}", 0, 1),
            stop=int(self.places.stop[before]),
            busy_s=busy if counts else 0.0,
            transfer_s=float(formulas.transfer_time(max(sent, returned), rate, latency_s)),
            ways_s=float(
                formulas.transfer_time(sent, rate, latency_s) + formulas.transfer_time(returned, rate, latency_s)
            ),
            cards=cards,
        )

    def _cards_of(self, before: int, behind: int, sent: float, returned: float) -> dict[Card, float]:
        """The load of every card by the messages of a boundary, as a share of the largest C."""
        loads: dict[Card, float] = defaultdict(float)
        for (level, component, way), busy_s in self.factory.cards.messages(before, behind).items():
            loads[level, component, way] += busy_s * sent / self.limits.step_time_s
            loads[level, component, 1 - way] += busy_s * returned / self.limits.step_time_s
        return loads

    # -- (5): minibatches in flight --

    def _cover(
        self,
        ending: dict[int, list[int]],
        leaving: dict[int, list[_Boundary]],
        beginning: dict[int, list[int]],
        entering: dict[int, list[_Boundary]],
    ) -> None:
        """Add constraint (5): the stages before a cut cover the minibatches in flight behind it."""
        columns, factory, limit_s = self.columns, self.factory, self.limits.high_s
        depth = columns.depth.astype(float)
        asked, covered = factory.asked(columns, depth, limit_s), factory.covered(columns, depth, limit_s)
        most = max((float(asked[number]) for numbers in beginning.values() for number in numbers), default=0.0)
        away = 0.0 if self.options.flushes else 2.0 / limit_s
        messages = max((one.transfer_s * away for found in leaving.values() for one in found), default=0.0)
        covered = np.minimum(covered, most + messages)
        for place, numbers in ending.items():
            for boundary in leaving[place]:
                boundary.covers = self.program.number(f"a_{boundary.taken.name}", 0.0, most)
                self.program.at_most([(boundary.covers, 1.0), (boundary.taken, -most)])
            parts = [(one.covers, -1.0) for one in leaving[place] if one.covers is not None]
            lost = [(one.taken, -one.transfer_s * away) for one in leaving[place]]
            self.program.at_least([*self._sum(numbers, covered), *lost, *parts])
        for place, numbers in beginning.items():
            parts = [(one.covers, 1.0) for one in entering[place] if one.covers is not None]
            self.program.at_least([*parts, *((variable, -amount) for variable, amount in self._sum(numbers, asked))])

    # -- (3) and (4): the objective --

    def _join_copies(self) -> None:
        """Add constraint (3)."""
        space, whole, limits = self.factory.space, self.factory.whole, self.limits
        for number in np.flatnonzero(self.columns.charged_s).tolist():
            charged = float(self.columns.charged_s[number]) / limits.step_time_s
            self.program.at_most([(self.taken[number], charged), (self.step_time, -1.0)])
        if self.options.flushes or space.copies == 1:
            scale = (whole.options.accumulate or 1) if self.options.flushes else 1
            self.program.at_most([(self.time, limits.high_s / scale / limits.step_time_s), (self.step_time, -1.0)])
            return
        among, exposed = space.synchronisation(whole) / limits.step_time_s, 1.0 - whole.options.overlap
        own = limits.high_s / space.copies / limits.step_time_s
        for of_time, of_copies in {(1.0, exposed), (exposed, 1.0)}:
            self.program.at_most([(self.time, own * of_time), (self.step_time, -1.0)], -of_copies * among)

    def _charge_steady(self) -> None:
        """Add constraint (4) for schedules without a flush."""
        low, unit = self.limits.low_s, self.limits.high_s
        beyond = np.maximum(0.0, self.columns.time_s - low) / unit
        by_worker: list[list[Term]] = [[] for _ in range(self.places.workers)]
        starts, stops = self.places.start[self.columns.place], self.places.stop[self.columns.place]
        for number in np.flatnonzero(beyond).tolist():
            for worker in range(int(starts[number]), int(stops[number])):
                by_worker[worker].append((self.taken[number], float(beyond[number])))
        by_stop: dict[int, list[Term]] = defaultdict(list)
        for boundary in self.boundaries:
            if boundary.busy_s > low:
                by_stop[boundary.stop].append((boundary.taken, (boundary.busy_s - low) / unit))
        for terms in (*by_worker, *by_stop.values()):
            if terms:
                self.program.at_most([*terms, (self.time, -1.0)], -low / unit)

    def _charge_batch(self) -> None:
        """Add constraint (4) for schedules with a flush."""
        columns, unit, program = self.columns, self.limits.high_s, self.program
        splits = TRAITS[self.options.schedule].splits
        time, ahead, drained, exposed = (
            amount / unit for amount in (columns.time_s, columns.ahead_s, columns.drained_s, columns.exposed_s)
        )
        path = [program.number(f"V_{worker}", 0, 1) for worker in range(self.places.workers + 1)]
        arrived = [program.number(f"W_{worker}", 0, 1) for worker in range(self.places.workers + 1)]
        by_stop: dict[int, list[_Boundary]] = defaultdict(list)
        for boundary in self.boundaries:
            by_stop[boundary.stop].append(boundary)
        for worker, numbers in enumerate(self.starting):
            following = (arrived[worker + 1], 1.0)
            ways = [(one.taken, one.ways_s / unit / (2 if splits else 1)) for one in by_stop[worker]]
            program.at_most([*ways, (path[worker], 1.0), (arrived[worker], -1.0)])
            program.at_most([*self._sum(numbers, ahead), following, (path[worker], -1.0)])
            program.at_most([*self._sum(numbers, drained), (path[worker], -1.0)])
            first = [number for number in numbers if columns.begin[number] == 0]
            awaited = self._sum(first if splits else numbers, exposed)
            program.at_most([*awaited, (path[worker], 1.0), (self.time, -1.0)])
            if splits:
                own = [(self.taken[number], float(exposed[number] + time[number])) for number in numbers]
                program.at_most([*own, (self.time, -1.0)])
        self._charge_traffic(path, by_stop)

    def _charge_traffic(self, path: list[Variable], by_stop: dict[int, list[_Boundary]]) -> None:
        """Add the part of constraint (4) for the traffic of boundaries under a flush, used if no cards are charged."""
        columns, unit, splits = self.columns, self.limits.high_s, TRAITS[self.options.schedule].splits
        stops = self.places.stop[columns.place]
        for stop, boundaries in by_stop.items():
            busy = [(one.taken, one.busy_s / unit) for one in boundaries if one.busy_s]
            for worker in range(stop) if busy else ():
                mine = [number for number in self.starting[worker] if stops[number] == stop]
                if not mine:
                    continue
                # The constraint counts only if a stage is on exactly these workers.
                most = max(amount for _, amount in busy)
                ahead = [(self.taken[number], float(columns.ahead_s[number]) / unit + most) for number in mine]
                self.program.at_most([*busy, *ahead, (path[worker], -1.0)], most)
                if splits:
                    late = [(self.taken[number], float(columns.exposed_s[number]) / unit) for number in mine]
                    self.program.at_most([*busy, *ahead, *late, (self.time, -1.0)], most)

    def _charge_cards(self) -> None:
        """Add constraint (8): the rings and the messages on every card."""
        loads: dict[Card, list[Term]] = defaultdict(list)
        cards, unit, columns = self.factory.cards, self.limits.step_time_s, self.columns
        _, parameters = self.factory.core_work(columns)
        for number, place in enumerate(columns.place.tolist()):
            for card, busy_s in cards.rings(place).items():
                loads[card].append((self.taken[number], busy_s * float(parameters[number]) / unit))
        for boundary in self.boundaries:
            for card, load in boundary.cards.items():
                loads[card].append((boundary.taken, load))
        for terms in loads.values():
            self.program.at_most([*terms, (self.step_time, -1.0)])

    def _charge_cores(self) -> None:
        """Add constraint (6): the cores of every server whose workers share them."""
        whole = self.factory.whole
        times = self._core_times() if whole.cluster.shared_cores else []
        for first, stop, cores in whole.cluster.shared_cores:
            inside = [
                sum(first <= worker < stop for worker in self._all_workers(run)) / cores / self.limits.step_time_s
                for run in self.places.runs
            ]
            amounts = [time * inside[place] for time, place in zip(times, self.columns.place.tolist(), strict=True)]
            self.program.at_most([*self._sum(range(len(amounts)), amounts), (self.step_time, -1.0)])

    def _all_workers(self, run: range) -> list[int]:
        """The workers of a stage in all copies."""
        space = self.factory.space
        firsts = self.factory.whole.cluster.starts(space.level)[space.first : space.first + space.copies]
        return [first + worker for worker in run for first in firsts]

    def _core_times(self) -> list[float]:
        """For every column, seconds for which each replica of its stage keeps a core busy (`contention`)."""
        whole, columns, overlap = self.factory.whole, self.columns, self.options.overlap
        links, accumulates = Links.of(whole.cluster), self.problem.training and self.options.schedule in ACCUMULATING
        work, parameters = self.factory.core_work(columns)
        found = []
        for number, place in enumerate(columns.place.tolist()):
            workers = self._all_workers(self.places.runs[place])
            group_s = 0.0
            if self.problem.training and not self.options.flushes and len(workers) > 1:
                size = float(parameters[number])
                group_s = float(formulas.ring_allreduce_time(len(workers), size, *links.allreduce_among(workers)))
            interval = (self.options.accumulate or 1) if accumulates else len(workers)
            found.append(float(formulas.core_time(float(work[number]), len(workers), group_s, interval, overlap)))
        return found

    # -- (7): the user's constraints --

    def _add_user_constraints(self) -> None:
        """Add constraint (7)."""
        options, everything = self.options, self._sum(range(len(self.columns)))
        # A uniform grid has a stage on each of its places.
        stages = options.stages if self.places.shape is None else self.places.shape.stages
        if stages is not None:
            self.program.equal(everything, float(stages))
        if options.max_stages is not None:
            self.program.at_most(everything, float(options.max_stages))
        if options.max_workers is not None:
            replicas = self.places.replicas[self.columns.place].tolist()
            busy = self._sum(range(len(self.columns)), replicas)
            self.program.at_most(busy, float(options.max_workers // self.problem.copies))
        home = {name: index for index, unit in enumerate(self.problem.units) for name in unit.layers}
        for name, number in options.pins:
            self._pin(home[name], number)

    def _pin(self, unit: int, number: int) -> None:
        """Add the part of constraint (7) that pins a unit to stage `number`: its stage is the one with that number to
        start."""
        cuts, columns = self.factory.cuts, self.columns
        holds = cuts.has[columns.end, unit] & ~cuts.has[columns.begin, unit]
        before: list[Term] = []
        for numbers in self.starting:
            mine = [one for one in numbers if holds[one]]
            if mine:
                most = float(self.places.workers)
                self.program.at_least([*before, *((self.taken[one], 1.0 - number) for one in mine)])
                self.program.at_most([*before, *((self.taken[one], most) for one in mine)], number - 1.0 + most)
            before = [*before, *self._sum(numbers)]

    # -- (9): versions under vertical sync --

    def _keep_versions(self) -> None:
        """Add constraint (9)."""
        columns, places, copies = self.columns, self.places, self.problem.copies
        room = self.places.capacity[columns.place] * (1 + formulas.ROUNDING) - columns.fixed_bytes
        room = room - columns.depth * columns.each_bytes
        size = columns.version_bytes
        most = np.floor(np.divide(room, size, out=np.full(len(columns), np.inf), where=size > 0) + formulas.ROUNDING)
        replicas = places.replicas[columns.place]
        first = np.flatnonzero((columns.begin == 0) & (columns.end < self.factory.last))
        for count in np.unique(replicas[columns.begin > 0]).tolist():
            asked = older_versions(replicas[first], columns.depth[first], np.array(count), copies)
            for least in np.unique(asked).tolist():
                asking = first[asked >= least].tolist()
                for numbers in self.starting:
                    short = [
                        one for one in numbers if columns.begin[one] and replicas[one] == count and most[one] < least
                    ]
                    if short:
                        self.program.at_most([*self._sum(short), *self._sum(asking)], 1.0)

    # -- the solution --

    def stages(self) -> list[Stage]:
        """The stages of the solution, input to output, on the workers of one copy."""
        chosen = [number for number, taken in enumerate(self.taken) if solution_value(taken) > 0.5]
        return [self._stage(number) for number in sorted(chosen, key=lambda one: int(self.columns.place[one]))]

    def _stage(self, number: int) -> Stage:
        columns, problem = self.columns, self.problem
        members = self.factory.cuts.members(int(columns.begin[number]), int(columns.end[number]))
        names = {name for unit in members for name in problem.units[unit].layers}
        layers = tuple(layer.name for layer in problem.profile.layers if layer.name in names)
        workers = tuple(self.places.runs[int(columns.place[number])])
        return Stage(layers, workers, max(1, int(columns.depth[number])), 1, bool(columns.again[number]))

    def step_time_s(self) -> float:
        """The value of C in the solution, in seconds per minibatch."""
        return solution_value(self.step_time) * self.limits.step_time_s


@dataclass
class _Boundary:
    """A boundary behind stages that end at worker `stop`. Times are for one minibatch, except `busy_s`, which is like
    `time_s` of columns."""

    taken: Variable
    stop: int
    busy_s: float
    transfer_s: float
    ways_s: float
    cards: dict[Card, float]
    """The load of every card, as a share of the upper bound on C."""
    covers: Variable | None = None
    """The minibatches behind the boundary that the stage before it covers."""


_ROOM = 1 - 1e-9
"""Tolerance for rounding below a lower bound."""

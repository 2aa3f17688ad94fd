"""Pipelines in the form in which the local search moves them: the stage of every unit and the workers of every stage.

Stages are on consecutive workers, in order, with idle workers anywhere between them, and all copies are alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.problem import Problem

STEPS = (1, 2, 4, 8)
"""Numbers of units, or of workers, that one move takes from a stage."""


@dataclass(frozen=True)
class StageLayout:
    """One copy of a pipeline, reduced to what the moves change."""

    home: tuple[int, ...]
    """The stage of every unit; the units are in a topological order."""
    room: tuple[int, ...]
    """Numbers of workers from left to right: idle before stage 0, in stage 0, idle before stage 1, …, idle at the
    end."""

    @staticmethod
    def of(plan: Plan, problem: Problem) -> StageLayout:
        """The layout of a plan whose stages are on consecutive workers."""
        stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
        room, end = [], 0
        for workers in plan.copy(0):
            room += [workers[0] - end, len(workers)]
            end = workers[-1] + 1
        home = tuple(stage_of[unit.layers[0]] for unit in problem.units)
        return StageLayout(home, (*room, problem.cluster.workers // plan.copies - end))

    def plan(self, template: Plan, problem: Problem) -> Plan:
        """The plan of this layout, with the copies and the schedule of `template`; all depths are 1 as yet."""
        size = problem.cluster.workers // template.copies
        members: list[list[str]] = [[] for _ in self.room[1::2]]
        for unit, stage in zip(problem.units, self.home, strict=True):
            members[stage] += unit.layers
        stages, position = [], 0
        for layers, idle, replicas in zip(members, self.room[:-1:2], self.room[1::2], strict=True):
            run = range(position + idle, position + idle + replicas)
            workers = tuple(copy * size + worker for worker in run for copy in range(template.copies))
            stages.append(Stage(tuple(layers), workers, 1, 1))
            position = run.stop
        return replace(template, stages=tuple(stages))

    def moved(self, *, grid: bool = False) -> Iterator[StageLayout]:
        """All neighbours, smaller moves first. In a uniform `grid` only the cuts move."""
        if grid:
            yield from self._recut()
            return
        for step in STEPS:
            yield from self._units_moved(step)
            yield from self._workers_moved(step)
        yield from self._merged()
        yield from self._split()
        for step in STEPS:
            for neighbour in self._units_moved(step):
                yield from neighbour._workers_moved(1)

    def _recut(self) -> Iterator[StageLayout]:
        """The neighbours that move one or two sets of units, for uniform grids."""
        for step in STEPS:
            yield from self._units_moved(step)
        for step in STEPS:
            for neighbour in self._units_moved(step):
                yield from neighbour._units_moved(1)

    def _units_moved(self, step: int) -> Iterator[StageLayout]:
        """The layouts in which `step` units move across the boundary between two stages."""
        stages = len(self.room) // 2
        members: list[list[int]] = [[] for _ in range(stages)]
        for unit, stage in enumerate(self.home):
            members[stage].append(unit)
        for stage, target in [pair for s in range(stages - 1) for pair in ((s, s + 1), (s + 1, s))]:
            if len(members[stage]) <= step:
                continue
            # In topological order the last units of a stage are read only by one another and by later stages.
            moving = set(members[stage][-step:] if target > stage else members[stage][:step])
            yield replace(self, home=tuple(target if unit in moving else home for unit, home in enumerate(self.home)))

    def _workers_moved(self, step: int) -> Iterator[StageLayout]:
        """The layouts in which `step` workers move between stages or idle places; every stage keeps a worker."""
        for source, target in itertools.permutations(range(len(self.room)), 2):
            if self.room[source] - step < source % 2:
                continue
            room = list(self.room)
            room[source] -= step
            room[target] += step
            yield replace(self, room=tuple(room))

    def _merged(self) -> Iterator[StageLayout]:
        """The layouts in which two neighbouring stages become one."""
        for stage in range(len(self.room) // 2 - 1):
            at = 2 * stage + 1
            room = (*self.room[:at], sum(self.room[at : at + 3]), *self.room[at + 3 :])
            yield StageLayout(tuple(home - (home > stage) for home in self.home), room)

    def _split(self) -> Iterator[StageLayout]:
        """The layouts in which one stage becomes two, its units and workers divided between them."""
        for stage in range(len(self.room) // 2):
            at, members = 2 * stage + 1, [unit for unit, home in enumerate(self.home) if home == stage]
            for count in range(1, len(members) if self.room[at] > 1 else 1):
                first = set(members[:count])
                home = tuple(old + (old >= stage and unit not in first) for unit, old in enumerate(self.home))
                for left in range(1, self.room[at]):
                    yield StageLayout(home, (*self.room[:at], left, 0, self.room[at] - left, *self.room[at + 1 :]))


def is_consecutive(plan: Plan, problem: Problem) -> bool:
    """Whether the moves apply to a plan: stages on consecutive workers in order, and copies at equal distances."""
    size, first = problem.cluster.workers // plan.copies, plan.copy(0)
    flat = [worker for workers in first for worker in workers]
    runs = all(workers[-1] - workers[0] + 1 == len(workers) for workers in first)
    alike = all(
        plan.copy(copy) == tuple(tuple(worker + copy * size for worker in workers) for workers in first)
        for copy in range(1, plan.copies)
    )
    return runs and flat == sorted(flat) and max(flat) < size and alike


def align_to_servers(layout: StageLayout, problem: Problem) -> StageLayout:
    """The layout with idle workers inserted, as far as there are any, so that stages avoid straddling two servers.

    A stage moves to the start of the next server if it would fit into one server but lies on two.
    """
    room, position = list(layout.room), 0
    for index in range(0, len(room) - 1, 2):
        replicas = room[index + 1]
        first = position + room[index]
        following = next(
            (start for start in problem.cluster.starts(problem.cluster.server_level) if start > first), first
        )
        if first + replicas > following and replicas <= problem.cluster.workers_per_server:
            shift = min(following - first, room[-1])
            room[index] += shift
            room[-1] -= shift
        position += room[index] + replicas
    return replace(layout, room=tuple(room))

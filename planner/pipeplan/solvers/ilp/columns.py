"""The columns of the integer program: the choices for one stage, with the cost of each.

A stage holds the layers between two cuts, on a place, and may recompute. All coefficients come from the evaluator's
formulas (`pipeplan.cost.formulas`), applied to arrays of columns. Coefficients that also depend on the next stage
belong to the boundaries in `program`. Times are seconds for one minibatch in one copy of the pipeline, or, with a
flush, for one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from pipeplan.cost import formulas
from pipeplan.cost.stage_table import CutStages
from pipeplan.plan.schedules import ACCUMULATING, GPIPE, TRAITS, VERTICAL, update_lag
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.cut_table import CutTable
from pipeplan.solvers.ilp.places import CardShares, Flags, Floats, Ints, Places
from pipeplan.solvers.plan_space import PlanSpace


@dataclass(frozen=True)
class Columns:
    """Columns as arrays of equal length, in ascending order of their first worker."""

    place: Ints
    begin: Ints
    """The cut at which the layers begin."""
    end: Ints
    again: Flags
    """Whether the stage recomputes."""
    depth: Ints
    """Minibatches in flight; 0 if the program leaves depths out."""
    time_s: Floats
    """Time for which a minibatch keeps the stage busy; with a flush, the time of all minibatches of an update."""
    ahead_s: Floats
    """With a flush: time by which the stage delays the stages behind it."""
    drained_s: Floats
    """With a flush: the part of `time_s` that the previous stages wait for."""
    exposed_s: Floats
    """With a flush: time of the update after the stage's last backward pass."""
    charged_s: Floats
    """Lower bound on the step time of all copies together, in seconds per minibatch."""
    group_s: Floats
    """Time of one all-reduce among the replicas."""
    fixed_bytes: Floats
    """Memory that does not grow with the depth, in bytes."""
    each_bytes: Floats
    """Memory for each minibatch in flight, in bytes."""
    version_bytes: Floats
    """Memory for each weight version that the input stage requires, in bytes; 0 except under vertical sync."""

    def __len__(self) -> int:
        return len(self.place)

    @cached_property
    def keys(self) -> Ints:
        """A number for each column. Columns with the same place, begin and end have the same number."""
        return (self.place << 32) + (self.begin << 16) + self.end

    @staticmethod
    def joined(parts: Sequence[Columns]) -> Columns:
        """All columns of several parts."""
        return Columns(
            **{one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(Columns)}
        )

    def take(self, kept: Flags | Ints | slice) -> Self:
        """The columns with these flags or indices."""
        return replace(self, **{field.name: getattr(self, field.name)[kept] for field in fields(self)})


class ColumnFactory:
    """Creates the columns of one copy of the pipeline in a space of plans."""

    def __init__(self, problem: Problem, space: PlanSpace, cuts: CutTable, places: Places) -> None:
        """Prepare a factory. `problem` is the whole problem; `places` has the places of one copy."""
        self.whole, self.space, self.cuts, self.places = problem, space, cuts, places
        self.problem = places.problem
        self.last = cuts.last
        self.minibatches = minibatches_per_update(self.problem)
        self.cards = CardShares(problem, space, places)
        recomputing = self.problem.training and self.problem.options.memory and self.problem.options.recompute
        self.recomputes = (False, True) if recomputing else (False,)

    def columns(self, place: Ints, begin: Ints, end: Ints, *, recompute: bool) -> Columns:
        """The columns of stages on places between cuts, without the costs of `charged`."""
        stages = self._stages(begin, end, recompute)
        group_s = self._group_s(place, stages.parameters)
        times = self._times(place, stages, group_s)
        fixed, each, version = self._memory(place, stages)
        return Columns(
            place=place,
            begin=begin,
            end=end,
            again=np.full(len(place), recompute),
            depth=np.zeros(len(place), dtype=np.intp),
            charged_s=np.zeros(len(place)),
            **times,
            group_s=group_s,
            fixed_bytes=fixed,
            each_bytes=each,
            version_bytes=version,
        )

    def _stages(self, begin: Ints, end: Ints, recompute: bool | Flags = False) -> CutStages:
        return CutStages(self.problem, self.cuts, begin, end, recompute, self.cuts.shared)

    def core_work(self, columns: Columns) -> tuple[Floats, Floats]:
        """Seconds of both passes of one minibatch on a worker, and bytes of the parameters."""
        stages = self._stages(columns.begin, columns.end, columns.again)
        return stages.work_s / self.places.speed[columns.place], stages.parameters

    def _group_s(self, place: Ints, parameters: Floats) -> Floats:
        if not self.problem.training:
            return np.zeros(len(place))
        members = self.places.replicas[place] * (self.problem.copies if self.problem.options.flushes else 1)
        rate, latency = self.places.ring_rate[place], self.places.ring_latency_s[place]
        return np.asarray(formulas.ring_allreduce_time(members, parameters, rate, latency))

    def _times(self, place: Ints, stages: CutStages, group_s: Floats) -> dict[str, Floats]:
        """The fields of `Columns` that are times."""
        options, replicas, nothing = self.problem.options, self.places.replicas[place], np.zeros(len(place))
        speed = self.places.speed[place]
        if not options.flushes or self.minibatches is None:
            compute = formulas.compute_time(stages.work_s, replicas, speed)
            time_s = formulas.overlapped(compute, group_s / (self.minibatches or replicas), options.overlap)
            return {"time_s": time_s, "ahead_s": nothing, "drained_s": nothing, "exposed_s": nothing}
        time_s = formulas.flush_busy(stages.passes_s / speed, float(self.minibatches), replicas)
        return {
            "time_s": time_s,
            "ahead_s": stages.ahead_s / speed,
            "drained_s": time_s - stages.tail_s / speed,
            "exposed_s": stages.waited_s(group_s, speed),
        }

    def charged(self, columns: Columns) -> Columns:
        """The columns with `charged_s`: the larger of `_card_s` and the wait of plain data parallelism for its
        update."""
        options, place, begin, end = self.problem.options, columns.place, columns.begin, columns.end
        if not options.contention:
            return columns
        found = self._card_s(place, begin, end)
        if not self.problem.training or options.schedule in ACCUMULATING:
            return replace(columns, charged_s=found)
        for row in np.flatnonzero((begin == 0) & (end == self.last)).tolist():
            waits_s = self.space.single_stage_s(
                self.whole, self.places.runs[place[row]], recompute=bool(columns.again[row])
            )
            found[row] = max(found[row], waits_s)
        return replace(columns, charged_s=found)

    def _card_s(self, place: Ints, begin: Ints, end: Ints) -> Floats:
        """Load of each stage alone on the busiest card around its workers, in seconds.

        The load consists of the stage's rings, and of the messages to and from stages outside of the card's
        component."""
        sent, returned = self.cuts.sent, self.cuts.returned
        parameters, busiest = self._stages(begin, end).parameters, np.zeros(len(place))
        for ring, message, at_end, at_start in self.places.own_cards:
            out = at_end[place] * sent[end] + at_start[place] * returned[begin]
            back = at_end[place] * returned[end] + at_start[place] * sent[begin]
            busy = ring[place] * parameters + message[place] * np.maximum(out, back)
            busiest = np.maximum(busiest, busy)
        return busiest

    def _memory(self, place: Ints, stages: CutStages) -> tuple[Floats, Floats, Floats]:
        """The fields `fixed_bytes`, `each_bytes` and `version_bytes` of `Columns`."""
        problem, nothing = self.problem, np.zeros(len(place))
        fixed, each, version = stages.kept_bytes + stages.workspace, stages.each_bytes, stages.version_bytes
        if not problem.training:
            return fixed, each, nothing
        everyone = self.places.replicas[place] * problem.copies
        fixed = fixed + stages.replica_bytes(everyone)
        lag = update_lag(everyone, stages.is_first & stages.is_last) * version
        if problem.options.schedule == VERTICAL:
            # The input stage has a version for each minibatch in flight, and determines the versions of the others.
            older = np.where(stages.is_first, 0.0, version)
            return fixed + np.where(stages.is_first, lag, version), each + version * stages.is_first, older
        if versions := TRAITS[problem.options.schedule].versions:
            return fixed + versions * version, each, nothing
        return fixed + lag, each + version, nothing

    # -- minibatches in flight --

    def wait(self, columns: Columns, limit_s: float) -> Floats:
        """Minibatches that pass while stages wait for their group, at a step time (`formulas.group_wait`)."""
        if self.minibatches is not None or not self.problem.training:
            return np.zeros(len(columns))
        replicas = self.places.replicas[columns.place]
        found = formulas.group_wait(columns.group_s, limit_s, replicas, self.problem.copies)
        return np.asarray(found, dtype=np.float64)

    def least_transfer_s(self, columns: Columns) -> Floats:
        """Time of one message to the next stage, over the fastest links that each stage may have."""
        busier = np.maximum(self.cuts.sent, self.cuts.returned)[columns.end]
        rate, latency = self.places.fastest_rate[columns.place], self.places.fastest_latency_s[columns.place]
        return np.where(columns.end == self.last, 0.0, formulas.transfer_time(busier, rate, latency))

    def everything(self, columns: Columns) -> Floats:
        """With a flush, the number of minibatches of an update on the busiest replica; else infinite."""
        if not self.problem.options.flushes:
            return np.full(len(columns), np.inf)
        return np.asarray(formulas.rounds(float(self.minibatches or 1), self.places.replicas[columns.place]))

    def depth_for(self, columns: Columns, behind: Floats, limit_s: float) -> Floats:
        """The depths of stages with `behind` minibatches in flight behind them, over the fastest links that they may
        have."""
        if self.problem.options.schedule == GPIPE:
            return self.everything(columns)
        replicas = self.places.replicas[columns.place]
        if self.problem.options.flushes:
            needed = formulas.flush_depth(behind, float(self.minibatches or 1), replicas)
        else:
            wait, transfer_s = self.wait(columns, limit_s), self.least_transfer_s(columns)
            needed = formulas.in_flight_depth(behind, wait, transfer_s, limit_s, replicas)
        return np.where(columns.end == self.last, 1.0, needed)

    def asked(self, columns: Columns, depth: Floats, limit_s: float) -> Floats:
        """The minibatches that the stage before must cover for stages of these depths (`formulas.in_flight_behind`)."""
        replicas = self.places.replicas[columns.place]
        return np.asarray(formulas.in_flight_behind(depth, replicas, self.wait(columns, limit_s)))

    def covered(self, columns: Columns, depth: Floats, limit_s: float) -> Floats:
        """The minibatches that stages of these depths can cover, messages included: `formulas.in_flight_depth` solved
        for `behind`."""
        if self.problem.options.schedule == GPIPE:
            return np.full(len(columns), np.inf)
        found = (depth - 1.0 + formulas.ROUNDING) * self.places.replicas[columns.place] - self.wait(columns, limit_s)
        return np.where(depth >= self.everything(columns), np.inf, found)

    def most_depth(self, columns: Columns, limit_s: float, older: Floats | float = 0.0) -> Floats:
        """The largest depths that fit in memory and, under 2BW, in an update (`formulas.buffered_step_time`).

        Under vertical sync, the stages behind the first keep `older` versions besides the newest.
        """
        most = np.full(len(columns), np.inf)
        if self.problem.options.memory:
            room = self.places.capacity[columns.place] * (1 + formulas.ROUNDING) - columns.fixed_bytes
            room, each = room - older * columns.version_bytes, columns.each_bytes
            most = np.divide(room, each, out=np.where(room >= 0, np.inf, -1.0), where=each > 0)
        if self.minibatches is not None and not self.problem.options.flushes:
            late = (columns.group_s + self.problem.copies_allreduce_s) / limit_s - 1.0 / self.problem.copies
            spare = self.minibatches - np.maximum(0.0, late)
            most = np.minimum(most, spare / self.places.replicas[columns.place])
        return np.asarray(np.floor(most + formulas.ROUNDING))


def minibatches_per_update(problem: Problem) -> int | None:
    """Minibatches of one update in one copy of the pipeline, if all stages share their updates; else None."""
    options = problem.options
    if not problem.training or options.schedule not in ACCUMULATING or options.accumulate is None:
        return None
    if options.flushes:
        return int(formulas.rounds(options.accumulate, problem.copies))
    return options.accumulate // problem.copies

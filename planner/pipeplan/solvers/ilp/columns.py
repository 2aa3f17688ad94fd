"""The columns of the integer program: the choices for one stage, with what each costs.

A stage holds the layers between two cuts, on a place, and may recompute. All coefficients are those of the evaluator's
formulas (`pipeplan.cost.formulas`), over arrays of columns; what depends on the next stage as well is in `Boundaries`
of `program`. Times are seconds for one minibatch in one copy of the pipeline, or with a flush for one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.ddp_overlap import ddp_step_time_s
from pipeplan.cost.stage_times import executor_work_s
from pipeplan.plan.plan import Stage
from pipeplan.plan.schedules import ACCUMULATING, GPIPE, TRAITS, VERTICAL, update_lag, update_share
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.cut_table import CutTable
from pipeplan.solvers.ilp.places import CardShares, Flags, Floats, Ints, Places
from pipeplan.solvers.plan_space import PlanSpace


@dataclass(frozen=True)
class Columns:
    """Columns in ascending order of their first worker: arrays of equal length."""

    place: Ints
    begin: Ints
    """The cut at which the layers begin."""
    end: Ints
    again: Flags
    """Whether the stage recomputes."""
    depth: Ints
    """Minibatches in flight; 0 where the program leaves depths out."""
    time_s: Floats
    """The time that a minibatch keeps the stage busy; with a flush that of all minibatches of an update."""
    ahead_s: Floats
    """With a flush: by how much the stage delays those behind it."""
    drained_s: Floats
    """With a flush: `time_s` as far as the stages before it have to wait for it."""
    exposed_s: Floats
    """With a flush: the time of the update after the stage's last backward pass."""
    charged_s: Floats
    """Lower bound on the step time of all copies together, seconds per minibatch."""
    group_s: Floats
    """One all-reduce among the replicas."""
    fixed_bytes: Floats
    """Memory that does not grow with the depth."""
    each_bytes: Floats
    """Memory for each minibatch in flight."""
    version_bytes: Floats
    """Memory for each weight version that the input stage asks for; 0 but under vertical sync."""

    def __len__(self) -> int:
        return len(self.place)

    @cached_property
    def keys(self) -> Ints:
        """Numbers that are equal where place, begin and end are."""
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
    """Makes the columns of one copy of the pipeline in a space of plans."""

    def __init__(self, problem: Problem, space: PlanSpace, cuts: CutTable, places: Places) -> None:
        """`problem` is the whole problem, `places` those of one copy."""
        self.whole, self.space, self.cuts, self.places = problem, space, cuts, places
        self.problem = places.problem
        self.last = cuts.last
        self.minibatches = minibatches_per_update(self.problem)
        self.cards = CardShares(problem, space, places)
        recomputing = self.problem.training and self.problem.options.memory and self.problem.options.recompute
        self.recomputes = (False, True) if recomputing else (False,)

    def columns(self, place: Ints, begin: Ints, end: Ints, *, recompute: bool) -> Columns:
        """The columns of stages on places between cuts, not yet `charged`."""
        problem, options, cuts = self.problem, self.problem.options, self.cuts
        speed = self.places.speed[place]
        forward = cuts.forward_s[end] - cuts.forward_s[begin]
        backward = cuts.work_s[end] - cuts.work_s[begin] - forward
        update_s = (cuts.update_s[end] - cuts.update_s[begin]) / speed
        own = self._executor_s(begin, end)
        forward_s = (forward + own / problem.passes) / speed
        backward_s = formulas.backward_time(forward, backward, recompute) / speed
        backward_s = backward_s + own * (problem.passes - 1) / problem.passes / speed
        parameters = self._parameters(begin, end)
        group_s = self._group_s(place, parameters)
        times = self._times(place, group_s, forward_s, backward_s, update_s)
        if options.flushes:
            times["exposed_s"] = times["exposed_s"] + 2 * cuts.exchanged_s(begin, end)
        fixed, each, version = self._memory(place, begin, end, parameters, recompute)
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

    def core_work(self, columns: Columns) -> tuple[Floats, Floats]:
        """Seconds of both passes of one minibatch on a worker, and bytes of the parameters."""
        begin, end, cuts = columns.begin, columns.end, self.cuts
        again = columns.again * (cuts.forward_s[end] - cuts.forward_s[begin])
        work = cuts.work_s[end] - cuts.work_s[begin] + again + self._executor_s(begin, end)
        return work / self.places.speed[columns.place], self._parameters(begin, end)

    def _parameters(self, begin: Ints, end: Ints) -> Floats:
        """Bytes of the parameters of stages, with copies of shared weights."""
        found = self.cuts.parameters[end] - self.cuts.parameters[begin]
        return found + self.cuts.copied(begin, end)

    def _executor_s(self, begin: Ints, end: Ints) -> Floats:
        """The executor's own work, in seconds on a device of speed 1 (`stage_times.executor_work_s`)."""
        problem, cuts = self.problem, self.cuts
        if not problem.executor_costs:
            return np.zeros(len(begin))
        crossing = cuts.sent + cuts.returned
        copied = np.where(end < self.last, (cuts.parameters[end] - cuts.parameters[begin]) * problem.copied_share, 0.0)
        boundaries = (begin > 0).astype(int) + (end < self.last)
        bytes_around = crossing[begin] + crossing[end]
        steps = problem.options.update_share
        work = formulas.executor_time(problem.executor_costs, problem.passes, boundaries, bytes_around, copied, steps)
        return np.asarray(work)

    def _group_s(self, place: Ints, parameters: Floats) -> Floats:
        if not self.problem.training:
            return np.zeros(len(place))
        members = self.places.replicas[place] * (self.problem.copies if self.problem.options.flushes else 1)
        rate, latency = self.places.ring_rate[place], self.places.ring_latency_s[place]
        return np.asarray(formulas.ring_allreduce_time(members, parameters, rate, latency))

    def _times(
        self, place: Ints, group_s: Floats, forward_s: Floats, backward_s: Floats, update_s: Floats
    ) -> dict[str, Floats]:
        """The fields of `Columns` that are times, but for exchanges of shared weights."""
        options, replicas, nothing = self.problem.options, self.places.replicas[place], np.zeros(len(place))
        if not options.flushes or self.minibatches is None:
            compute = formulas.compute_time(forward_s + backward_s, replicas, 1.0)
            time_s = formulas.overlapped(compute, group_s / (self.minibatches or replicas), options.overlap)
            return {"time_s": time_s, "ahead_s": nothing, "drained_s": nothing, "exposed_s": nothing}
        splits = TRAITS[options.schedule].splits
        backward_s = backward_s - update_s
        time_s = formulas.flush_busy(forward_s + backward_s, float(self.minibatches), replicas)
        exposed_s = formulas.flush_exposed(group_s, backward_s, self.problem.hidden_share)
        return {
            "time_s": time_s,
            "ahead_s": forward_s if splits else forward_s + backward_s,
            "drained_s": time_s - backward_s / 2 if splits else time_s,
            "exposed_s": exposed_s + update_s / update_share(options.accumulate),
        }

    def charged(self, columns: Columns) -> Columns:
        """The columns with `charged_s`: the wait of plain data parallelism for its update, and `_card_s`."""
        options, place, begin, end = self.problem.options, columns.place, columns.begin, columns.end
        if not options.contention:
            return columns
        found = self._card_s(place, begin, end)
        if not self.problem.training or options.schedule in ACCUMULATING:
            return replace(columns, charged_s=found)
        for row in np.flatnonzero((begin == 0) & (end == self.last)).tolist():
            again = bool(columns.again[row])
            stage = Stage(self.whole.layer_names, tuple(self.places.runs[place[row]]), 1, 1, again)
            plan = self.space.plan(self.whole, [stage])
            work = self.whole.work_s + again * float(self.cuts.forward_s[-1]) + executor_work_s(plan, self.whole, 0)
            pass_s = work / self.whole.cluster.speed_of(plan.stages[0].workers)
            found[row] = max(found[row], ddp_step_time_s(plan, self.whole, self._whole_links, pass_s))
        return replace(columns, charged_s=found)

    def _card_s(self, place: Ints, begin: Ints, end: Ints) -> Floats:
        """What stages alone put on the busiest card around their workers: their rings, and the messages of boundaries
        whose other stage is outside."""
        sent, returned = self.cuts.sent, self.cuts.returned
        parameters, busiest = self._parameters(begin, end), np.zeros(len(place))
        for ring, message, at_end, at_start in self.places.own_cards:
            out = at_end[place] * sent[end] + at_start[place] * returned[begin]
            back = at_end[place] * returned[end] + at_start[place] * sent[begin]
            busy = ring[place] * parameters + message[place] * np.maximum(out, back)
            busiest = np.maximum(busiest, busy)
        return busiest

    @cached_property
    def _whole_links(self) -> Links:
        return Links.of(self.whole.cluster)

    def _memory(
        self, place: Ints, begin: Ints, end: Ints, parameters: Floats, recompute: bool
    ) -> tuple[Floats, Floats, Floats]:
        """The bytes of `Columns.fixed_bytes`, `each_bytes` and `version_bytes` (`cost.memory`)."""
        problem, options, cuts = self.problem, self.problem.options, self.cuts
        saved, sent, received = cuts.saved[end] - cuts.saved[begin], cuts.sent[end], cuts.sent[begin]
        around = sent + received + cuts.returned[end] + cuts.returned[begin]
        buffers, training = cuts.buffers[end] - cuts.buffers[begin], problem.training
        fixed = formulas.fixed_memory(parameters, buffers, around, problem.state_ratio, training)
        nothing = np.zeros(len(place))
        if not training:
            return np.asarray(fixed), nothing, nothing
        everyone = self.places.replicas[place] * problem.copies
        fixed = fixed + formulas.replica_memory(parameters, everyone)
        fixed = fixed - formulas.divided_state(parameters, everyone, problem.divided_ratio)
        fixed = fixed + formulas.recompute_memory(saved, sent, recompute) + cuts.workspace(begin, end)
        each = formulas.memory_per_depth(0, saved, received, sent, recompute=recompute)
        version = formulas.version_memory(parameters, 1, options.copies_per_version)
        lag = update_lag(everyone, (begin == 0) & (end == self.last)) * version
        if options.schedule == VERTICAL:
            # The input stage has a version for each minibatch in flight. It decides how many the others have.
            first = begin == 0
            older = np.where(first, 0.0, version)
            return fixed + np.where(first, lag, version), each + version * first, older
        if versions := TRAITS[options.schedule].versions:
            return fixed + versions * version, np.asarray(each), nothing
        return fixed + lag, each + version, nothing

    # -- minibatches in flight --

    def wait(self, columns: Columns, limit_s: float) -> Floats:
        """The minibatches for which stages wait for their group at a step time (`formulas.group_wait`)."""
        if self.minibatches is not None or not self.problem.training:
            return np.zeros(len(columns))
        replicas = self.places.replicas[columns.place]
        found = formulas.group_wait(columns.group_s, limit_s, replicas, self.problem.copies)
        return np.asarray(found, dtype=np.float64)

    def least_transfer_s(self, columns: Columns) -> Floats:
        """The time of one message behind every stage, over the fastest links that it may have."""
        busier = np.maximum(self.cuts.sent, self.cuts.returned)[columns.end]
        rate, latency = self.places.fastest_rate[columns.place], self.places.fastest_latency_s[columns.place]
        return np.where(columns.end == self.last, 0.0, formulas.transfer_time(busier, rate, latency))

    def everything(self, columns: Columns) -> Floats:
        """With a flush, the minibatches of an update on the busiest replica; else infinite."""
        if not self.problem.options.flushes:
            return np.full(len(columns), np.inf)
        return np.asarray(formulas.rounds(float(self.minibatches or 1), self.places.replicas[columns.place]))

    def depth_for(self, columns: Columns, behind: Floats, limit_s: float) -> Floats:
        """The depths of stages with so much in flight behind them, over the fastest links that they may have."""
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
        """What stages of these depths ask the one before them to cover (`formulas.in_flight_behind`)."""
        replicas = self.places.replicas[columns.place]
        return np.asarray(formulas.in_flight_behind(depth, replicas, self.wait(columns, limit_s)))

    def covered(self, columns: Columns, depth: Floats, limit_s: float) -> Floats:
        """What stages of these depths can cover, their messages included: `formulas.in_flight_depth` for `behind`."""
        if self.problem.options.schedule == GPIPE:
            return np.full(len(columns), np.inf)
        found = (depth - 1.0 + formulas.ROUNDING) * self.places.replicas[columns.place] - self.wait(columns, limit_s)
        return np.where(depth >= self.everything(columns), np.inf, found)

    def most_depth(self, columns: Columns, limit_s: float, older: Floats | float = 0.0) -> Floats:
        """The largest depths that fit in memory and, under 2BW, in an update (`formulas.buffered_step_time`).

        Under vertical sync the stages behind the first keep `older` versions beside the newest.
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

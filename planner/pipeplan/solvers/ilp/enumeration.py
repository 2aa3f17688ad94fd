"""Enumerates the columns that a plan within a limit on its step time may have.

A plan is a path of columns, from no layers at the first worker to all layers at the last worker. The enumeration drops
a column if it takes longer than the limit by itself, or does not fit in memory. It also drops a column that is on no
path within the limit that fits in memory with the fewest minibatches in flight behind each stage. If no columns remain,
there is no plan. The columns within a limit are a subset of the columns within a larger limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from pipeplan.cost import formulas
from pipeplan.cost.stage_table import LayersAlone
from pipeplan.plan.schedules import TRAITS, VERTICAL, update_lag, vertical_versions
from pipeplan.solvers.ilp.columns import ColumnFactory, Columns
from pipeplan.solvers.ilp.places import Flags, Floats, Ints
from pipeplan.util.deadline import Deadline

MOST_PAIRS = 20_000_000
"""Largest number of pairs of cuts on places to examine, which takes about ten seconds."""
MOST_COLUMNS = 3_000_000
"""Largest number of columns that are kept. Each takes a few hundred bytes."""
_TOGETHER = 500_000
"""Number of pairs that are examined together."""
_SLACK = 1 + formulas.ROUNDING


class TooManyColumnsError(Exception):
    """The program would be too large."""


class ColumnEnumeration:
    """Finds the columns within a limit, in seconds for one minibatch of one copy, or, with a flush, for one update."""

    def __init__(self, factory: ColumnFactory, deadline: Deadline) -> None:
        self.factory, self.cuts, self.places, self.deadline = factory, factory.cuts, factory.places, deadline
        self.problem, self.last = factory.problem, factory.last
        options = self.problem.options
        self.flushes = options.flushes
        self.rounds = float(factory.minibatches or 1) if self.flushes else 1.0
        self.work = self.cuts.work_s - self.cuts.update_s if self.flushes else self.cuts.work_s
        speeds = [0.0, *(self.problem.cluster.device_of(worker).speed for worker in range(self.places.workers))]
        self.speeds = np.cumsum(speeds)
        self.busier = np.maximum(self.cuts.sent, self.cuts.returned)
        self.round_trip = self.cuts.sent + self.cuts.returned

    def within(self, limit_s: float, step_time_s: float, among: Columns | None = None) -> Columns:
        """The columns of plans that take at most `limit_s`, and at most `step_time_s` with all copies.

        `among` has the columns within a larger limit, if they are known. Raises `TooManyColumnsError`.
        """
        if among is not None:
            return self._on_paths(among.take(self._alone(among, limit_s, step_time_s)), limit_s)
        kept: list[Columns] = []
        for pairs in self._batches(limit_s):
            self.deadline.check()
            quick = self._may_fit(*pairs, limit_s)
            for recompute in self.factory.recomputes:
                columns = self.factory.columns(*(part[quick] for part in pairs), recompute=recompute)
                columns = self.factory.charged(columns.take(self._alone(columns, limit_s, step_time_s)))
                kept.append(columns.take(columns.charged_s <= step_time_s * _SLACK))
            if sum(map(len, kept)) > MOST_COLUMNS:
                raise TooManyColumnsError(f"more than {MOST_COLUMNS:,} stages are fast enough")
        columns = Columns.joined(kept)
        return self._on_paths(columns.take(np.argsort(columns.place, kind="stable")), limit_s)

    # -- pairs of cuts on places --

    def _batches(self, limit_s: float) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Batches of (places, cuts at which their stages begin, cuts at which they end)."""
        pending: list[tuple[Ints, Ints, Ints]] = []
        waiting = looked = 0
        for place, begin, end in self._pairs(limit_s):
            nested = self.cuts.larger[begin, end]
            pending.append((np.full(int(nested.sum()), place), begin[nested], end[nested]))
            looked, waiting = looked + len(begin), waiting + len(begin)
            if looked > MOST_PAIRS:
                raise TooManyColumnsError(f"more than {MOST_PAIRS:,} pairs of cuts on workers are to be looked at")
            if waiting > _TOGETHER:
                yield _concatenated(pending)
                pending, waiting = [], 0
        yield _concatenated(pending)

    def _pairs(self, limit_s: float) -> Iterator[tuple[int, Ints, Ints]]:
        """For every place, the pairs (begin, end) of cuts with at most as much work between them as the place can
        do."""
        places, work, limit_s = self.places, self.work, limit_s * _SLACK
        by_work = np.argsort(work, kind="stable")
        servers = formulas.rounds(self.rounds, places.replicas.astype(float)) if self.flushes else 1 / places.replicas
        most = limit_s * places.speed / servers
        for worker, mine in enumerate(places.by_start(np.arange(len(places)))):
            begin = np.flatnonzero((work <= self._doable(0, worker, limit_s)) & (np.arange(len(work)) < self.last))
            begin = begin[(begin > 0) | (worker in places.firsts)] if worker else begin[:1]
            for place in range(mine.start, mine.stop):
                first = 1 if worker and places.movable[place] and len(begin) and begin[0] == 0 else 0
                stop = int(places.stop[place])
                enough = work[-1] - work <= self._doable(stop, places.workers, limit_s) + work[-1] * formulas.ROUNDING
                # By rounding, the last cut may have less work than a cut that lacks only a layer without work.
                ends = by_work[enough[by_work] & (by_work > 0)] if stop < places.workers else np.array([self.last])
                low = np.searchsorted(work[ends], work[begin[first:]] - work[-1] * formulas.ROUNDING)
                high = np.searchsorted(work[ends], work[begin[first:]] + most[place], "right")
                counts = np.maximum(0, high - low)
                ahead = np.repeat(low - np.cumsum(counts) + counts, counts)
                yield place, np.repeat(begin[first:], counts), ends[ahead + np.arange(len(ahead))]

    def _doable(self, first: int, stop: int, limit_s: float) -> float:
        """Largest work on one minibatch that these workers can do within a limit, in seconds."""
        speed = float(self.speeds[stop] - self.speeds[first])
        return limit_s * speed / self.rounds if speed else 0.0

    # -- conditions for a single stage --

    def _may_fit(self, place: Ints, begin: Ints, end: Ints, limit_s: float) -> Flags:
        """Whether stages may fit in memory, with one minibatch in flight at every worker that must be busy behind them.

        The options must also allow this number of workers. The quick test leaves few stages for the exact tests.
        """
        problem, options, replicas = self.problem, self.problem.options, self.places.replicas[place]
        fastest_s = max(device.speed for device in problem.cluster.devices) * limit_s * _SLACK / self.rounds
        busy = np.ceil((self.work[-1] - self.work) / fastest_s - 1e-6)
        before = np.ceil(self.work / fastest_s - 1e-6)
        allowed = options.max_workers // problem.copies if options.max_workers else np.inf
        quick = before[begin] + replicas + busy[end] <= min(allowed, problem.minibatches_in_flight or np.inf)
        if not options.memory:
            return np.asarray(quick)
        each = self.cuts.sent[begin] * problem.training
        depth = np.ones(len(place))
        if problem.training and not self.flushes:
            depth = np.where(end == self.last, 1.0, 1.0 + np.ceil(busy[end] / replicas))
            if TRAITS[options.schedule].versions == 0:
                each = each + self.cuts.parameters[end] - self.cuts.parameters[begin]
        fixed = self._least_bytes[end] - self._least_bytes[begin]
        return np.asarray(quick & (fixed + (depth - 1) * each <= self.places.capacity[place] * _SLACK))

    @cached_property
    def _least_bytes(self) -> Floats:
        """For each cut, a lower bound on the bytes that its layers take on a worker, for any depth and replicas."""
        problem = self.problem
        # If replicas divide the state, any part of it may be on another worker.
        layers = LayersAlone(problem, self.cuts, problem.state_ratio - problem.divided_ratio)
        versions = max(1, TRAITS[problem.options.schedule].versions) * problem.training
        return np.asarray(layers.kept_bytes + versions * layers.version_bytes + layers.each_bytes)

    def _alone(self, columns: Columns, limit_s: float, step_time_s: float) -> Flags:
        """Flags of the columns that stay within the limit and fit in memory at depth 1, whatever the other stages
        are."""
        kept = (columns.time_s + columns.exposed_s <= limit_s * _SLACK) & (columns.charged_s <= step_time_s * _SLACK)
        kept &= self.factory.most_depth(columns, limit_s) >= 1
        last = columns.end == self.last
        kept &= last | (self._traffic_s(columns) <= limit_s * _SLACK)
        return np.asarray(kept)

    def _traffic_s(self, columns: Columns) -> Floats:
        """For each column, a lower bound on the time for which messages to the next stage keep their links busy."""
        if self.flushes and self.problem.options.contention:
            return np.zeros(len(columns))
        place = columns.place
        each = formulas.boundary_time(self.busier[columns.end], self.places.fastest_rate[place])
        links = self.places.most_links[place]
        return np.asarray(
            columns.ahead_s + formulas.flush_busy(each, self.rounds, links) if self.flushes else each / links
        )

    # -- conditions on paths --

    def _on_paths(self, columns: Columns, limit_s: float) -> Columns:
        """The columns on paths within the limit.

        Dropping columns leaves fewer paths for the other columns, so the function repeats the step.
        """
        older = np.zeros(self.places.workers + 1)
        while True:
            self.deadline.check()
            kept, least = self.to_the_output(columns, limit_s, older)
            columns, least = columns.take(kept), least[kept]
            on_both, _ = self.from_the_input(columns, limit_s, least, older)
            asked = self._older(columns.take(on_both), least[on_both])
            if kept.all() and on_both.all() and (asked <= older).all():
                return columns
            columns, older = columns.take(on_both), np.maximum(older, asked)

    def _path_s(self, columns: Columns) -> Floats:
        """With a flush, lower bound on the time by which a stage and its next boundary delay the stages behind."""
        if not self.flushes:
            return np.zeros(len(columns))
        rate, latency_s = (
            figure[columns.place] for figure in (self.places.fastest_rate, self.places.fastest_latency_s)
        )
        ways = self.round_trip[columns.end] / rate + 2 * latency_s
        half = 2 if TRAITS[self.problem.options.schedule].splits else 1
        return columns.ahead_s + np.where(columns.end == self.last, 0.0, ways / half)

    def to_the_output(self, columns: Columns, limit_s: float, older: Floats) -> tuple[Flags, Floats]:
        """(whether each column is on a path to the output, smallest depth of each column)."""
        places, factory, count = self.places, self.factory, len(self.cuts)
        # First half: all columns that start at a worker. Second half: columns that directly follow another stage.
        longest, in_flight = np.full((2, 2, count, places.workers + 1), np.inf)
        behind_s, behind = np.full((2, count, places.workers + 1), np.inf)
        behind_s[self.last], behind[self.last] = 0.0, 0.0
        most = factory.most_depth(columns, limit_s, older[places.replicas[columns.place]])
        path_s, stop = self._path_s(columns), places.stop[columns.place]
        splits = TRAITS[self.problem.options.schedule].splits
        kept, least = np.zeros(len(columns), dtype=bool), np.zeros(len(columns))
        for worker, mine in reversed(list(enumerate(places.by_start(columns.place)))):
            here, at = columns.take(mine), (columns.end[mine], stop[mine])
            late = np.maximum(here.drained_s, path_s[mine] + behind_s[at])
            awaited = late + (0.0 if splits else here.exposed_s)
            needed = factory.depth_for(here, np.where(np.isfinite(behind[at]), behind[at], 0.0), limit_s)
            kept[mine] = (awaited <= limit_s * _SLACK) & np.isfinite(behind[at]) & (needed <= most[mine])
            least[mine] = needed
            good, asked = kept[mine], factory.asked(here, needed, limit_s)
            rows = places.movable[here.place[good]].astype(np.intp), here.begin[good], worker
            np.minimum.at(longest, rows, late[good])
            np.minimum.at(in_flight, rows, asked[good])
            starts = list(places.starts_behind(worker)) if worker else []
            if starts:
                for found, by_start in ((behind_s, longest), (behind, in_flight)):
                    least_of = np.minimum(by_start[0][:, starts].min(axis=1), by_start[1][:, worker])
                    found[: self.last, worker] = least_of[: self.last]
        return kept, least

    def from_the_input(self, columns: Columns, limit_s: float, least: Floats, older: Floats) -> tuple[Flags, Floats]:
        """(whether each column is on a path from the input, largest depth of each that fits and that the path can
        cover)."""
        places, factory, count = self.places, self.factory, len(self.cuts)
        ahead_s, cover = np.full((count, places.workers + 1), np.inf), np.full((count, places.workers + 1), -np.inf)
        most = factory.most_depth(columns, limit_s, older[places.replicas[columns.place]])
        wait, stop = factory.wait(columns, limit_s), places.stop[columns.place]
        replicas, path_s = places.replicas[columns.place], self._path_s(columns)
        away = 2 * factory.least_transfer_s(columns) / limit_s if not self.flushes else np.zeros(len(columns))
        kept = np.zeros(len(columns), dtype=bool)
        for worker, mine in enumerate(places.by_start(columns.place)):
            stops = places.stops_before[worker]
            before_s = ahead_s[:, stops].min(axis=1) if stops else np.full(count, np.inf)
            covered = cover[:, stops].max(axis=1) if stops else np.full(count, -np.inf)
            before_s[0], covered[0] = (0.0, np.inf) if worker in places.firsts else (np.inf, -np.inf)
            begin, follows = columns.begin[mine], places.movable[columns.place[mine]] & (columns.begin[mine] > 0)
            path_before_s = np.where(follows, ahead_s[begin, worker], before_s[begin])
            if self.problem.training:
                mine_covered = np.where(follows, cover[begin, worker], covered[begin])
                allowed = np.floor((mine_covered - wait[mine]) / replicas[mine] + 1e-6)
                most[mine] = np.minimum(most[mine], allowed)
            kept[mine] = path_before_s + columns.drained_s[mine] <= limit_s * _SLACK
            kept[mine] &= most[mine] >= least[mine]
            good = np.flatnonzero(kept[mine])
            row = mine.start + good
            at = columns.end[row], stop[row]
            np.minimum.at(ahead_s, at, path_before_s[good] + path_s[row])
            np.maximum.at(cover, at, factory.covered(columns.take(row), most[row], limit_s) - away[row] + 1e-6)
        return kept, most

    def most_needed(self, columns: Columns, limit_s: float, most: Floats) -> Floats:
        """The largest depths that columns need on any path behind them, limited to `most`."""
        places, factory, count = self.places, self.factory, len(self.cuts)
        in_flight, behind = np.full((2, count, places.workers + 1), 0.0)
        stop, most = places.stop[columns.place], np.minimum(most, factory.everything(columns))
        slowest = places.links.sendrecv_among(range(self.problem.cluster.workers))
        away = 2 * formulas.transfer_time(self.busier, *slowest) / limit_s
        away[self.last] = 0.0
        for worker, mine in reversed(list(enumerate(places.by_start(columns.place)))):
            here = columns.take(mine)
            ahead = behind[here.end, stop[mine]] + (0.0 if self.flushes else away[here.end])
            # Add one for rounding.
            needed = factory.depth_for(here, ahead, limit_s) + (here.end < self.last)
            most[mine] = np.minimum(most[mine], needed)
            np.maximum.at(in_flight[:, worker], here.begin, factory.asked(here, most[mine], limit_s))
            starts = list(places.starts_behind(worker)) if worker else []
            if starts:
                behind[:, worker] = in_flight[:, starts].max(axis=1)
        return most

    def with_depths(self, columns: Columns, limit_s: float) -> Columns:
        """The columns, one for each depth that a stage may need and that fits, at this limit."""
        if not self.problem.training:
            return without_twins(columns)
        older = np.zeros(self.places.workers + 1)
        _, least = self.to_the_output(columns, limit_s, older)
        _, most = self.from_the_input(columns, limit_s, least, older)
        needed = self.most_needed(columns, limit_s, np.full(len(columns), np.inf))
        enough = most >= needed
        most = np.minimum(most, np.maximum(needed, least))
        kept = most >= least
        kept &= ~(columns.again & np.isin(columns.keys, columns.keys[~columns.again & enough]))
        columns, least, most = columns.take(kept), least[kept], most[kept]
        counts = (most - least + 1).astype(np.intp)
        if counts.sum() > MOST_COLUMNS:
            raise TooManyColumnsError(f"its stages would have more than {MOST_COLUMNS:,} depths")
        rows = np.repeat(np.arange(len(columns)), counts)
        ahead = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return replace(columns.take(rows), depth=(least[rows] + ahead).astype(np.intp))

    def _older(self, columns: Columns, least: Floats) -> Floats:
        """Under vertical sync, the smallest number of versions besides the newest that a stage keeps, by its number of
        replicas."""
        counts = np.arange(self.places.workers + 1)
        found = np.zeros(len(counts))
        first = (columns.begin == 0) & (columns.end < self.last)
        if self.problem.options.schedule != VERTICAL or not self.problem.training or not first.any():
            return found
        replicas = self.places.replicas[columns.place[first]]
        asked = older_versions(replicas, least[first].astype(np.intp), counts[1:, None], self.problem.copies)
        found[1:] = asked.min(axis=1)
        return found


def without_twins(columns: Columns) -> Columns:
    """The columns, except columns that recompute although the same stage exists without recomputation."""
    return columns.take(~(columns.again & np.isin(columns.keys, columns.keys[~columns.again])))


def older_versions(first_replicas: Ints, depth: Ints, replicas: Ints, copies: int) -> Ints:
    """Number of weight versions besides the newest that stages behind an input stage keep
    (`schedules.vertical_versions`)."""
    delay = depth + update_lag(first_replicas * copies, False)
    return np.asarray(vertical_versions(delay, first_replicas, replicas) - 1)


def _concatenated(parts: list[tuple[Ints, Ints, Ints]]) -> tuple[Ints, Ints, Ints]:
    nothing = np.zeros(0, dtype=np.intp)
    place, begin, end = (
        (np.concatenate([nothing, *arrays]) for arrays in zip(*parts, strict=True))
        if parts
        else (
            nothing,
            nothing,
            nothing,
        )
    )
    return place, begin, end

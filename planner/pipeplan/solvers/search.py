"""Is there a pipeline with every resource within a threshold? The search that decides it, on equal machines.

It works from the output end over cuts, because the minibatches that a stage holds in flight depend on the stages behind
it, and keeps at every cut the states (see `states`) that no other dominates. A stage I→J in front of a state at J takes
r workers that end at some e ≤ p. Only some r and e can lead to states that are not dominated:

  e   p itself, or the last component edge before it at each level: what lies between edges can be moved to one
  r   within each level, from the fewest replicas that are quick enough and fit in memory on; more of them only where
      the demand r · depth falls, which it does where the depth does: the fewest replicas for each smaller depth

Everything is decided for all I and all states of one J at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pipeplan import cost
from pipeplan.cuts import Floats, Ints
from pipeplan.solvers.pool import Pool
from pipeplan.solvers.replicas import Intervals
from pipeplan.solvers.states import Counting, Flags, Layout, States, undominated
from pipeplan.solvers.terms import StageTerms, Terms

# What rounding may add to a time that equals the threshold.
SLACK = 1e-12


# Up to so many numbers of replicas are tried at once.
_FEW = 40


class OutOfTime(Exception):
    """The deadline passed in the middle of a search."""


@dataclass(frozen=True)
class Limits:
    """What a search is asked for, beside the threshold."""

    memory: bool
    """Whether the devices' memory limits."""
    recompute: bool = False
    """Whether stages may compute their forward pass twice."""
    counting: Counting = field(default_factory=Counting)
    exact_stages: int | None = None
    max_stages: int | None = None
    max_workers: int | None = None
    deadline: float | None = None
    """By `time.perf_counter`."""
    every_cut: bool = False
    """Whether the states of all cuts are wanted, also of those that another cut makes superfluous."""


@dataclass(frozen=True)
class Step:
    """One stage of a pipeline that a search found."""

    start: int
    """The cuts that it lies between."""
    end: int
    first: int
    """Its workers are first … first + replicas - 1."""
    replicas: int
    depth: int
    recompute: bool


@dataclass(frozen=True)
class Tries:
    """Pairs of a place to put stages and a cut I, flattened: stages to be sized, a column each."""

    numbers: Ints
    behind: Floats
    """The demand of the state behind."""

    @staticmethod
    def of(stage: StageTerms, states: States, places: Places, need: Ints, at: tuple[Ints, Ints, Ints]) -> Tries:
        """From level, target and place of each; `need` is the workers that the cut I needs before it."""
        level, target, place = at
        state = places.state[place]
        lowest = np.maximum(need[stage.targets][target], places.lowest[place])
        rows = (
            target,
            level,
            state,
            places.end[place],
            lowest,
            places.room[level, place],
            states.first[state],
            states.level[state],
        )
        return Tries(np.stack(rows), states.demand[state])

    def take(self, rows: Ints | Flags) -> Tries:
        """Some of them."""
        return Tries(self.numbers[:, rows], self.behind[rows])

    def _row(self, index: int) -> Ints:
        row: Ints = self.numbers[index]
        return row

    @property
    def target(self) -> Ints:
        """Index into the cuts I that are considered."""
        return self._row(0)

    @property
    def level(self) -> Ints:
        """That the stage's workers span, exactly."""
        return self._row(1)

    @property
    def state(self) -> Ints:
        """The state that the stage is put in front of."""
        return self._row(2)

    @property
    def end(self) -> Ints:
        """One past the last worker."""
        return self._row(3)

    @property
    def next_first(self) -> Ints:
        """The first worker of the next stage."""
        return self._row(6)

    @property
    def next_level(self) -> Ints:
        """What the next stage spans."""
        return self._row(7)

    def roomy(self, replicas: Floats) -> Flags:
        """Whether there are so many workers within the level, and enough before them."""
        found: Flags = (replicas <= self.numbers[5]) & (replicas <= self.numbers[3] - self.numbers[4])
        return found


Sized = tuple[Tries, Floats, Floats, Floats]
"""Stages with their replicas, depths and demands."""


@dataclass(frozen=True)
class Places:
    """Where stages may end: a state and an e ≤ p."""

    state: Ints
    end: Ints
    lowest: Ints
    """No stage may start before, or the boundary behind it would take too long."""
    room: Ints
    """By level 0 … L (rows): workers of e's component of that level up to e."""

    def __len__(self) -> int:
        return len(self.end)


class Search:
    """One threshold. `run` gives the stages of a pipeline, input to output, or None; `kept` holds all states."""

    def __init__(self, terms: Terms, threshold: float, limits: Limits) -> None:
        self.terms, self.limits = terms, limits
        self.layout: Layout = terms.layout
        self.threshold = self.pace = threshold
        self.within = threshold * (1 + SLACK)
        self.last = len(terms.cuts.ideals) - 1
        self.kept: dict[int, States] = {}
        self.added_s = 0.0
        # No cut can be reached with fewer workers left in front than its work needs; none at all means no work left.
        need = np.ceil(terms.cuts.work_s / (terms.speed * self.within) - 1e-9)
        self.need = np.maximum(need, 1).astype(np.intp)
        self.need[0] = 0
        # The highest level over which a cut's boundary is quick enough; -1: none.
        self.widest = (terms.boundary_s <= self.within).sum(axis=1) - 1
        self.usable = (self.widest >= 1) | (np.arange(self.last + 1) == 0)
        self.usable[self.last] = True

    def run(self) -> list[Step] | None:
        """Search all cuts. Raises `OutOfTime` at the deadline."""
        pool = Pool(self.last + 1)
        pool.add(np.array([self.last]), self.start())
        for cut in range(self.last, -1, -1):
            self._check_time()
            found = pool.take(cut)
            if found is None:
                continue
            states = self._undominated(found)
            self.kept[cut] = states
            if cut == 0:
                return self._walk()
            for targets, fresh in self._extend(cut, states):
                pool.add(targets, fresh)
        return None

    def _check_time(self) -> None:
        if self.limits.deadline is not None and time.perf_counter() > self.limits.deadline:
            raise OutOfTime

    def _undominated(self, found: States) -> States:
        return undominated(found, self.layout, self.limits.counting)

    def start(self) -> States:
        """The state at the cut of everything."""
        return States.start(self.terms.workers)

    def _walk(self) -> list[Step] | None:
        """The pipeline behind the best state at the empty cut."""
        states = self.kept[0]
        allowed = np.ones(len(states), dtype=bool)
        if self.limits.exact_stages is not None:
            allowed &= states.stages == self.limits.exact_stages
        rows = np.flatnonzero(allowed)
        if not len(rows):
            return None
        extra = np.zeros(len(states)) if states.extra is None else states.extra
        keys = (-states.first, states.workers, states.stages, states.demand if self.terms.first else extra)
        row = int(rows[np.lexsort(tuple(key[rows] for key in keys))[0]])
        self.added_s = float(extra[row])
        steps, cut = [], 0
        while cut != self.last:
            states = self.kept[cut]
            end = int(states.end[row])
            steps.append(
                Step(
                    cut,
                    end,
                    int(states.first[row]),
                    int(states.replicas[row]),
                    int(states.depth[row]),
                    bool(states.recompute[row]),
                )
            )
            cut, row = end, int(states.source[row])
        return steps

    # -- what the threshold allows --

    @property
    def counts_depths(self) -> bool:
        """Whether what is in flight can decide: by its memory, or as two versions of the weights must suffice."""
        return self.terms.training and (self.limits.memory or self.terms.accumulate is not None)

    def _crowd(self, targets: Ints, demand: Floats) -> Floats:
        """Workers that the stages in front of cuts (rows) need at least for their memory, by the demand (columns)."""
        return self.terms.crowd(targets, demand)

    def extra(self, stage: StageTerms, before: Floats, target: Ints, joined: Ints) -> Floats:
        """What adds up over stages, with one more: nothing, in the steady state."""
        return before

    def _versions_suffice(self, stage: StageTerms, tries: Tries, replicas: Floats, demand: Floats) -> Flags:
        """Whether two versions of the weights suffice, where there are no more (`cost.buffered_pace`)."""
        accumulate, copies = self.terms.accumulate, self.terms.problem.copies
        if accumulate is None:
            return np.ones(len(replicas), dtype=bool)
        spare = accumulate - demand
        allreduce = stage.allreduce(tries.target, replicas, tries.level) + self.terms.problem.copies_allreduce_s
        in_time: Flags = (spare >= 0) & (allreduce <= self.within * (np.maximum(spare, 0) + 1 / copies))
        return in_time

    def allowed(self, stage: StageTerms) -> Intervals:
        """The numbers of replicas that keep stages within the threshold, level by level."""
        return stage.allowed(self.within)

    def _fewest(self, stage: StageTerms) -> Floats:
        """The fewest of them, by level and stage."""
        return self.allowed(stage).least(np.ones((self.layout.top + 1, len(stage.targets))))

    def _wait(self, stage: StageTerms, tries: Tries, replicas: Floats) -> Floats:
        """Minibatches that go by while replicas wait for their group's all-reduce."""
        return stage.wait(tries.target, replicas, tries.level, self.threshold)

    def _deepened(self, replicas: Floats, cover: Floats) -> Floats:
        """The depth that covers what is in flight behind."""
        depth: Floats = 1 + np.ceil(cover / replicas - cost.ROUNDING)
        return depth

    def _replicas_for(self, depth: Floats, cover: Floats) -> Floats:
        """The fewest replicas of which a depth covers that."""
        with np.errstate(divide="ignore", invalid="ignore"):
            count: Floats = np.ceil(cover / np.maximum(depth - 1, 0) - cost.ROUNDING)
        return count

    def _more_replicas(self, deepest: Floats, cover: Floats) -> Floats:
        """The fewest replicas that may do where a depth has to be at most `deepest`; infinite where none can."""
        return np.where(deepest >= 1, self._replicas_for(deepest, cover), np.inf)

    def _least_demand(self, replicas: Floats, behind: Floats) -> Floats:
        """The demand of a stage is at least this: r · depth ≥ r and what the depth covers together."""
        return replicas + behind

    # -- one cut --

    def _extend(self, cut: int, states: States) -> Iterator[tuple[Ints, States]]:
        """Every state that a stage in front of these leads to, with the cuts that they are at."""
        states, rows = self._open(states)
        targets = self._targets(cut)
        if not len(states) or not len(targets):
            return
        places = self._places(cut, states)
        variants = (False, True) if self.limits.recompute else (False,)
        for recompute in variants:
            stage = self.terms.stage(cut, targets, recompute=recompute)
            fits = stage.deepest(replicated=False) >= 1 if self.limits.memory else np.ones(len(targets), dtype=bool)
            if not fits.any():
                continue
            if not fits.all():
                stage = stage.take(np.flatnonzero(fits))
            yield from self._put(stage, states, rows, places, recompute)

    def _open(self, states: States) -> tuple[States, Ints]:
        """The states that another stage may be put in front of, and their rows."""
        rows = np.arange(len(states))
        most = self.limits.exact_stages or self.limits.max_stages
        if most is not None:
            rows = rows[states.stages < most]
        if self.limits.max_workers is not None:
            rows = rows[states.workers[rows] < self.limits.max_workers]
        return states.take(rows), rows

    def _targets(self, cut: int) -> Ints:
        smaller = self.terms.cuts.smaller(cut)
        usable: Ints = smaller[self.usable[smaller]]
        return usable

    def _places(self, cut: int, states: States) -> Places:
        """All e for all states, without duplicates."""
        spans, first = self.layout.spans, states.first
        ends = np.sort(np.stack([first, *(first // span * span for span in spans[1:-1])]).T, axis=1)
        state, column = np.nonzero((ends > 0) & np.diff(ends, axis=1, append=-1).astype(bool))
        end = ends[state, column]
        if cut == self.last:
            lowest = np.zeros(len(end), dtype=np.intp)
        else:
            widest = int(self.widest[cut])
            lowest = first // spans[widest] * spans[widest]
            lowest = np.where(states.level <= widest, lowest, self.terms.workers)[state]
        # The component that holds the last worker, e - 1; a level 0 component has room for one.
        room = np.minimum(end - (end - 1) // spans[:, None] * spans[:, None], self.terms.most_replicas)
        inside = end > lowest
        return Places(state[inside], end[inside], lowest[inside], room[:, inside])

    def _put(
        self, stage: StageTerms, states: States, rows: Ints, places: Places, recompute: bool
    ) -> Iterator[tuple[Ints, States]]:
        """Size stages for every place, and give the states that they lead to."""
        if not len(places):
            return
        if self.counts_depths:
            tries, replicas = self._quick(stage, states, places)
            sized = self._in_memory(stage, tries, replicas)
        else:
            tries, replicas = self._quickest(stage, states, places)
            if self.limits.memory:
                fits = (replicas == 1) | (stage.deepest(replicated=True)[tries.target] >= 1)
                tries, replicas = tries.take(fits), replicas[fits]
            sized = tries, replicas, np.ones(len(replicas)), np.zeros(len(replicas))
        yield from self._states(stage, states, rows, *sized, recompute=recompute)

    def _quickest(self, stage: StageTerms, states: States, places: Places) -> tuple[Tries, Floats]:
        """The fewest replicas that are quick enough, for every place and target.

        A lower level never needs more of them, so that the lowest that has room decides.
        """
        least = self._fewest(stage)
        fewest = np.full((len(stage.targets), len(places)), np.inf)
        spanned = np.zeros(fewest.shape, dtype=np.intp)
        for level in range(self.layout.top, -1, -1):
            fits = least[level][:, None] <= places.room[level]
            fewest = np.where(fits, least[level][:, None], fewest)
            spanned = np.where(fits, level, spanned)
        need = np.maximum(self.need[stage.targets][:, None], places.lowest)
        fewest[places.end - fewest < need] = np.inf
        if self.compares_cuts:
            self._forget(stage.targets, fewest)
        target, place = np.nonzero(np.isfinite(fewest))
        at = spanned[target, place], target, place
        return Tries.of(stage, states, places, self.need, at), fewest[target, place]

    @property
    def compares_cuts(self) -> bool:
        """Whether `_forget` may be used: where memory plays no part, nor the number of a stage."""
        limits = self.limits
        return not (self.counts_depths or limits.memory or limits.every_cut) and limits.exact_stages is None

    def _forget(self, targets: Ints, fewest: Floats) -> None:
        """Drop the stages from a cut I (rows, for every place) if one from I - v needs no more replicas.

        That is sound where no more bytes cross I - v than I. Whatever stages can be put in front of I, those without v
        can be put in front of I - v: they have less work, and at each of their cuts I' no more bytes cross, as with
        bytes c counted for each direction c(I' - v) + c(I) ≤ c(I') + c(I - v) for cuts I' ⊂ I (c is submodular).
        """
        large, small = self.terms.cuts.downhill
        if not len(large):
            return
        needed = np.full((self.last + 1, fewest.shape[1]), np.inf)
        needed[targets] = fewest
        dominated = np.isfinite(needed[large]) & (needed[small] <= needed[large])
        lost = np.zeros(needed.shape, dtype=bool)
        edge, place = np.nonzero(dominated)
        lost[large[edge], place] = True
        fewest[lost[targets]] = np.inf

    def _quick(self, stage: StageTerms, states: States, places: Places) -> tuple[Tries, Floats]:
        """The same on runs that span exactly each level: where depths matter more replicas may be better."""
        need = np.maximum(self.need[stage.targets][:, None], places.lowest)
        # The depth that covers what is in flight behind must fit in memory; and so must the stages further in front.
        behind = states.demand[places.state]
        covering = np.zeros(need.shape)
        if not stage.is_last:
            covering = self._replicas_for(stage.deepest(replicated=False)[:, None], behind)
        need = np.maximum(need, self._crowd(stage.targets, behind))
        inside = np.vstack([np.zeros_like(places.room[:1]), places.room[:-1]])
        count = np.maximum(self._fewest(stage)[:, :, None], np.maximum(inside[:, None, :] + 1, covering))
        level, target, place = np.nonzero(count <= np.minimum(places.room[:, None, :], places.end - need))
        at = level, target, place
        tries = Tries.of(stage, states, places, self.need, at)
        replicas = self.allowed(stage).least(count[at], (tries.level, tries.target))
        fits = tries.roomy(replicas)
        return tries.take(fits), replicas[fits]

    def _in_memory(self, stage: StageTerms, tries: Tries, replicas: Floats) -> tuple[Tries, Floats, Floats, Floats]:
        """The replica counts that fit in memory, each for a depth of its own, as long as the demand may fall.

        Returns the tries, one for each, with replicas, depths and demands.
        """
        replicas, depth, demand = self._size(stage, tries, replicas, np.full(len(replicas), np.inf))
        good = np.isfinite(replicas)
        tries, replicas, depth, demand = tries.take(good), replicas[good], depth[good], demand[good]
        found = [(tries, replicas, depth, demand)]
        # A smaller depth takes more replicas, and is of use only while it may lower their product.
        more = depth > 2
        # So many numbers of replicas may do: r · depth is at least r and what the depth covers together.
        extra = np.where(more, np.ceil(demand - tries.behind - cost.ROUNDING) - 1 - replicas, 0.0)
        few = more & (extra <= _FEW) & self.counts_up
        found += self._counted_up(stage, tries.take(few), replicas[few], demand[few], extra[few])
        many = more & ~few
        found += self._stepped(stage, tries.take(many), replicas[many], depth[many], demand[many])
        parts, *columns = zip(*found, strict=True)
        joined = Tries(
            np.concatenate([part.numbers for part in parts], axis=1), np.concatenate([part.behind for part in parts])
        )
        count, depth, demand = (np.concatenate(column) for column in columns)
        if self.terms.accumulate is None:
            return joined, count, depth, demand
        enough = self._versions_suffice(stage, joined, count, demand)
        return joined.take(enough), count[enough], depth[enough], demand[enough]

    @property
    def counts_up(self) -> bool:
        """Whether a depth always covers all that is in flight behind, so that `_counted_up` may be used."""
        return True

    def _counted_up(
        self, stage: StageTerms, tries: Tries, replicas: Floats, demand: Floats, extra: Floats
    ) -> list[Sized]:
        """All numbers of replicas up to so many more that lower the demand."""
        times = np.maximum(extra, 0).astype(np.intp)
        which = np.repeat(np.arange(len(times)), times)
        if not len(which):
            return []
        step = np.arange(len(which)) - np.repeat(np.cumsum(times) - times, times) + 1
        here, count = tries.take(which), replicas[which] + step
        fits = here.roomy(count)
        which, here, count = which[fits], here.take(fits), count[fits]
        wait = self._wait(stage, here, count)
        depth = self._deepened(count, self._cover(stage, here, count, wait))
        lower = cost.in_flight_behind(depth, count, wait)
        good = (lower < demand[which]) & (depth <= stage.deepest_of(here.target, count))
        good[good] = self.allowed(stage).least(count[good], (here.level[good], here.target[good])) == count[good]
        return [(here.take(good), count[good], depth[good], lower[good])]

    def _stepped(self, stage: StageTerms, tries: Tries, replicas: Floats, depth: Floats, demand: Floats) -> list[Sized]:
        """The fewest replicas for each smaller depth, where they may lower the demand."""
        times = np.maximum(depth - 2, 0).astype(np.intp)
        which = np.repeat(np.arange(len(times)), times)
        if not len(which):
            return []
        smaller: Floats = (np.arange(len(which)) - np.repeat(np.cumsum(times) - times, times) + 2).astype(float)
        behind = tries.behind[which]
        least = np.maximum(self._replicas_for(smaller, behind), replicas[which] + 1)
        useful = np.flatnonzero(self._least_demand(least, behind) < demand[which])
        useful = useful[tries.take(which[useful]).roomy(least[useful])]
        which, here = which[useful], tries.take(which[useful])
        count, reached, lower = self._size(stage, here, least[useful], smaller[useful])
        good = np.isfinite(count) & (lower < demand[which])
        return [(here.take(good), count[good], reached[good], lower[good])]

    def _size(
        self, stage: StageTerms, tries: Tries, replicas: Floats, deepest: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """The fewest replicas, from those given on, for which a depth of `deepest` suffices; infinite if none.

        Returns replicas, depth and demand. What must be covered grows with the replicas (their all-reduce takes longer,
        the boundary may span more), so that the least fixed point from below is the least solution.
        """
        count, depth, demand = replicas.copy(), np.ones(len(replicas)), np.zeros(len(replicas))
        left = np.arange(len(replicas))
        while len(left):
            here = tries.take(left)
            now = self.allowed(stage).least(count[left], (here.level, here.target))
            count[left] = np.where(here.roomy(now), now, np.inf)
            fits = np.isfinite(count[left])
            left, here, now = left[fits], here.take(fits), now[fits]
            wait = self._wait(stage, here, now)
            cover = self._cover(stage, here, now, wait)
            deep = np.where(stage.lasts[here.target], 1.0, self._deepened(now, cover))
            depth[left], demand[left] = deep, cost.in_flight_behind(deep, now, wait)
            most = np.minimum(deepest[left], stage.deepest_of(here.target, now))
            late = np.flatnonzero(deep > most)
            left = left[late]
            count[left] = np.maximum(self._more_replicas(most[late], cover[late]), now[late] + 1)
        return count, depth, demand

    def _cover(self, stage: StageTerms, tries: Tries, replicas: Floats, wait: Floats) -> Floats:
        """What a stage's minibatches in flight, beyond one for each replica, must cover (see `cost.in_flight_depth`).

        The transfer is at the level of the component that holds both stages.
        """
        start = (tries.end - replicas).astype(np.intp)
        joined = np.maximum(self.layout.between(start, tries.next_first), tries.next_level)
        cover: Floats = tries.behind + wait + 2 * self.terms.transfer_s[stage.ends[tries.target], joined] / self.pace
        return cover

    def _states(
        self,
        stage: StageTerms,
        states: States,
        rows: Ints,
        tries: Tries,
        replicas: Floats,
        depth: Floats,
        demand: Floats,
        *,
        recompute: bool,
    ) -> Iterator[tuple[Ints, States]]:
        """The states that stages lead to, with the cuts that they are at."""
        count, state = replicas.astype(np.intp), tries.state
        workers, stages = states.workers[state] + count, states.stages[state] + 1
        targets = stage.targets[tries.target]
        columns = {
            "first": tries.end - count,
            "level": tries.level,
            "stages": stages,
            "workers": workers,
            "replicas": count,
            "depth": depth.astype(np.intp),
            "recompute": np.full(len(count), int(recompute)),
            "end": stage.ends[tries.target],
            "source": rows[state],
        }
        extra = None
        if states.extra is not None:
            joined = np.maximum(self.layout.between(tries.end - count, tries.next_first), tries.next_level)
            extra = self.extra(stage, states.extra[state], tries.target, joined)
        fresh = States.of(columns, demand, extra)
        good = self._worth(targets, workers, stages)
        if not good.all():
            targets, fresh = targets[good], fresh.take(good)
        if len(targets):
            yield targets, fresh

    def _worth(self, targets: Ints, workers: Ints, stages: Ints) -> Flags:
        """Whether states can still become a pipeline within the user's limits."""
        good = np.ones(len(targets), dtype=bool)
        limits = self.limits
        if limits.max_workers is not None:
            good &= workers + self.need[targets] <= limits.max_workers
        if (most := limits.exact_stages or limits.max_stages) is not None:
            good &= stages + (targets > 0) <= most
        if self.terms.pinned and limits.exact_stages is not None:
            good &= self.terms.respects_pins(targets, limits.exact_stages - stages)
        return good

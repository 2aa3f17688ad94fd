"""Decides whether a uniform cluster has a pipeline with every resource within a threshold.

The search visits the cuts from the output end, because the minibatches that a stage holds in flight depend on the
stages behind it. At every cut it keeps the states (see `states`) that no other state dominates. A stage I→J in front of
a state at J takes r workers that end at some e ≤ p. Only some values of r and e can lead to undominated states:

  e   p itself, or the last component edge before p at each level: an end between edges can be moved to an edge
  r   within each level, the fewest replicas that are fast enough and fit in memory, and the fewest replicas for each
      smaller depth: more replicas help only if the demand r · depth falls

All I and all states of one J are processed at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SearchLimits, Step
from pipeplan.solvers.dp.search.batch_limit import BatchLimit
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.stage_sizing import CandidateStages, EndPositions, StageSizing
from pipeplan.solvers.dp.search.stage_terms import StageTerms
from pipeplan.solvers.dp.search.states import SearchStates, StatePool, undominated_states
from pipeplan.solvers.dp.search.worker_bounds import WorkerBounds


class UniformSearch(StageSizing):
    """The search for a pipeline within one threshold on a uniform cluster. `kept` holds all states by cut."""

    batch: BatchLimit | None = None
    """The limit on the time of a batch, under a flush schedule."""

    def __init__(self, terms: CostTerms, threshold: float, limits: SearchLimits) -> None:
        super().__init__(terms, threshold, limits)
        self.last = len(terms.cuts.ideals) - 1
        self.kept: dict[int, SearchStates] = {}
        # The workers in front of a cut must suffice for the work before it; without work, none are needed.
        need = np.ceil(terms.cuts.work_s / (terms.speed * self.within) - 1e-9)
        self.need = np.maximum(need, 1).astype(np.intp)
        self.need[0] = 0
        # The highest level at which a cut's boundary is fast enough; -1 if there is none.
        self.widest = (terms.boundary_s <= self.within).sum(axis=1) - 1
        self.usable = (self.widest >= 1) | (np.arange(self.last + 1) == 0)
        self.usable[self.last] = True
        self.most_demand = self._most_demand()
        # A caller that needs the states of all cuts, such as a certificate, must not miss any.
        precise = limits.memory and not limits.every_cut and WorkerBounds.suits(terms.cuts)
        self.bounds = self._worker_bounds() if precise else None

    def _worker_bounds(self) -> WorkerBounds:
        """Bounds on the workers in front of every cut, for work and memory together."""
        return WorkerBounds(self.terms, 1 / self.within, recompute=self.limits.recompute)

    def _most_demand(self) -> Floats:
        """For each cut, the largest demand of the stage behind it for which an update has enough minibatches.

        The demand of the input stage is at most the number of minibatches of an update in one copy. The demand of each
        stage exceeds that of the stage behind it by at least its replicas and the messages between the two.
        """
        accumulate = self.terms.accumulate
        if accumulate is None or self.limits.every_cut:
            return np.full(self.last + 1, np.inf)
        under_way = 2 * self.terms.least_transfer_s / self.threshold - accumulate * formulas.ROUNDING
        most = accumulate - self.need - np.maximum(np.ceil(under_way), 0)
        most[0] = accumulate
        return np.asarray(most)

    def run(self) -> list[Step] | None:
        """Search all cuts. Returns a pipeline, input to output, or None; raises `OutOfTime` at the deadline."""
        pool = StatePool(self.last + 1)
        pool.add(np.array([self.last]), self.start())
        for cut in range(self.last, -1, -1):
            found = self._take(cut, pool)
            if found is None:
                continue
            self.kept[cut] = found
            if cut == 0:
                return self._walk()
            for targets, new_states in self._extend(cut, found):
                pool.add(targets, new_states)
        return None

    def _take(self, cut: int, pool: StatePool) -> SearchStates | None:
        """The undominated states at a cut."""
        waiting = pool.take(cut)
        if waiting is None:
            return None
        self.limits.step(len(waiting))
        return self._undominated(cut, waiting)

    def _undominated(self, cut: int, states: SearchStates) -> SearchStates:
        return undominated_states(states, self.layout, self.limits.counting)

    def start(self) -> SearchStates:
        """The state at the full cut."""
        shape = self.limits.shape
        states = SearchStates.start(self.terms.workers if shape is None else shape.workers)
        return states if self.batch is None else replace(states, times=np.zeros((1, 2)))

    def _walk(self) -> list[Step] | None:
        """The pipeline of the best state at the empty cut."""
        states = self.kept[0]
        allowed = np.ones(len(states), dtype=bool)
        if self.limits.exact_stages is not None:
            allowed &= states.stages == self.limits.exact_stages
        rows = np.flatnonzero(allowed)
        if not len(rows):
            return None
        best = np.zeros(len(states)) if states.times is None else states.times[:, 1]
        keys = (-states.first, states.workers, states.stages, states.demand if self.terms.first else best)
        row = int(rows[np.lexsort(tuple(key[rows] for key in keys))[0]])
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

    def workers_for_memory(self, targets: Ints, demand: Floats) -> Floats:
        """The fewest workers that stages in front of cuts (rows) need for their memory, given the demands (columns)."""
        if self.bounds is None:
            return self.terms.workers_for_memory(targets, demand)
        return self.bounds.at(targets[:, None], demand)

    # -- the stages in front of one cut --

    def _extend(self, cut: int, states: SearchStates) -> Iterator[tuple[Ints, SearchStates]]:
        """The states that result from adding a stage in front of these states, each with its cut."""
        states, rows = self.open_states(states)
        targets = self._leading(cut)
        targets = targets[self.usable[targets]]
        if not len(states) or not len(targets):
            return
        places = self.end_positions(cut, states)
        variants = (False, True) if self.limits.recompute else (False,)
        for again in variants:
            stage = StageTerms.of(self.terms, cut, targets, recompute=again)
            fits = stage.deepest(replicated=False) >= 1 if self.limits.memory else np.ones(len(targets), dtype=bool)
            if not fits.any():
                continue
            if not fits.all():
                stage = stage.take(np.flatnonzero(fits))
            yield from self._size_stages(stage, states, rows, places)

    def open_states(self, states: SearchStates) -> tuple[SearchStates, Ints]:
        """The states in front of which another stage may be added, and their rows."""
        rows = np.arange(len(states))
        most = self.limits.exact_stages or self.limits.max_stages
        if most is not None:
            rows = rows[states.stages < most]
        if self.limits.max_workers is not None:
            rows = rows[states.workers[rows] < self.limits.max_workers]
        return states.take(rows), rows

    def _leading(self, cut: int) -> Ints:
        """The cuts at which a stage in front of this one may begin."""
        return self.terms.cuts.smaller(cut)

    def end_positions(self, cut: int, states: SearchStates) -> EndPositions:
        """All ends e for all states, without duplicates."""
        spans, first = self.layout.spans, states.first
        # In a uniform grid, no worker between stages is idle.
        idle = spans[1:-1] if self.limits.shape is None else ()
        ends = np.sort(np.stack([first, *(first // span * span for span in idle)]).T, axis=1)
        state, column = np.nonzero((ends > 0) & np.diff(ends, axis=1, append=-1).astype(bool))
        end = ends[state, column]
        if cut == self.last:
            lowest = np.zeros(len(end), dtype=np.intp)
        else:
            widest = int(self.widest[cut])
            lowest = first // spans[widest] * spans[widest]
            lowest = np.where(states.level <= widest, lowest, self.terms.workers)[state]
        # The component of the last worker, e - 1; a component of level 0 has room for one worker.
        room = np.minimum(end - (end - 1) // spans[:, None] * spans[:, None], self.terms.most_replicas)
        inside = end > lowest
        return EndPositions(state[inside], end[inside], lowest[inside], room[:, inside])

    def _size_stages(
        self, stage: StageTerms, states: SearchStates, rows: Ints, places: EndPositions
    ) -> Iterator[tuple[Ints, SearchStates]]:
        """Size the stages for every end position, and yield the resulting states."""
        if not len(places):
            return
        stage = self._short_enough(stage, places)
        if self.counts_depths:
            candidates, replicas = self._replicas_by_level(stage, states, places)
            sized = self._in_memory(stage, candidates, replicas)
        else:
            candidates, replicas = self._fewest_replicas(stage, states, places)
            if self.limits.memory:
                fits = (replicas == 1) | (stage.deepest(replicated=True)[candidates.target] >= 1)
                candidates, replicas = candidates.take(fits), replicas[fits]
            sized = candidates, replicas, np.ones(len(replicas)), np.zeros(len(replicas))
        yield from self._states(stage, states, rows, *sized)

    def _short_enough(self, stage: StageTerms, places: EndPositions) -> StageTerms:
        """The stages that have room at some end position. On thousands of workers, most stages have room nowhere."""
        room = places.room.max(axis=1)[:, None]
        most = np.minimum(room, int(places.end.max()) - self.need[stage.begin])
        fits = (self._fewest(stage) <= most).any(axis=0)
        return stage if fits.all() else stage.take(np.flatnonzero(fits))

    def _fewest_replicas(
        self, stage: StageTerms, states: SearchStates, places: EndPositions
    ) -> tuple[CandidateStages, Floats]:
        """The fewest replicas that are fast enough, for every end position and target cut.

        A lower level never needs more replicas, so the lowest level with enough room decides.
        """
        least = self._fewest(stage)
        fewest = np.full((len(stage), len(places)), np.inf)
        spanned = np.zeros(fewest.shape, dtype=np.intp)
        for level in range(self.layout.top, -1, -1):
            fits = least[level][:, None] <= places.room[level]
            fewest = np.where(fits, least[level][:, None], fewest)
            spanned = np.where(fits, level, spanned)
        need = np.maximum(self.need[stage.begin][:, None], places.lowest)
        fewest[places.end - fewest < need] = np.inf
        target, place = np.nonzero(np.isfinite(fewest))
        pairs = spanned[target, place], target, place
        return CandidateStages.of(stage, states, places, self.need, pairs), fewest[target, place]

    def _replicas_by_level(
        self, stage: StageTerms, states: SearchStates, places: EndPositions
    ) -> tuple[CandidateStages, Floats]:
        """Like `_fewest_replicas`, but for each level: more replicas than needed can reduce the required depth."""
        need = np.maximum(self.need[stage.begin][:, None], places.lowest)
        # Both the depth that covers the minibatches in flight behind and the stages in front must fit in memory.
        behind = states.demand[places.state]
        covering = np.zeros(need.shape)
        if not stage.is_last:
            covering = self._replicas_for(stage.deepest(replicated=False)[:, None], behind)
        need = np.maximum(need, self.workers_for_memory(stage.begin, behind))
        inside = np.vstack([np.zeros_like(places.room[:1]), places.room[:-1]])
        count = np.maximum(self._fewest(stage)[:, :, None], np.maximum(inside[:, None, :] + 1, covering))
        # A stage's demand is at least its replicas plus the demand of the stage behind it.
        most = np.minimum(places.end - need, self.most_demand[stage.begin][:, None] - behind)
        level, target, place = np.nonzero(count <= np.minimum(places.room[:, None, :], most))
        pairs = level, target, place
        candidates = CandidateStages.of(stage, states, places, self.need, pairs)
        replicas = self.allowed(stage).least(count[pairs], (candidates.level, candidates.target))
        fits = candidates.has_room(replicas)
        return candidates.take(fits), replicas[fits]

    def _states(
        self,
        stage: StageTerms,
        states: SearchStates,
        rows: Ints,
        candidates: CandidateStages,
        replicas: Floats,
        depth: Floats,
        demand: Floats,
    ) -> Iterator[tuple[Ints, SearchStates]]:
        """The states that result from sized stages, each with its cut."""
        count = replicas.astype(np.intp)
        own = {
            "first": candidates.end - count,
            "level": candidates.level,
            "replicas": count,
            "depth": depth.astype(np.intp),
            "recompute": np.full(len(count), int(stage.recompute)),
            "end": stage.ends[candidates.target],
        }
        times = self._times(stage, states, candidates, replicas)
        new_states = SearchStates.in_front(states, rows, candidates.state, own, demand, times)
        targets, new_states = self.completable(stage.begin[candidates.target], new_states)
        if len(targets):
            yield targets, new_states

    def completable(self, targets: Ints, states: SearchStates) -> tuple[Ints, SearchStates]:
        """The states that can still be completed to a whole pipeline, each with its cut."""
        completable = self.can_complete(targets, states)
        if self.bounds is not None:
            completable &= states.first >= self.bounds.at(targets, states.demand)
        return (targets, states) if completable.all() else (targets[completable], states.take(completable))

    def _times(
        self, stage: StageTerms, states: SearchStates, candidates: CandidateStages, replicas: Floats
    ) -> Floats | None:
        """The batch times of the new states; None in the steady state."""
        return None

    def can_complete(self, targets: Ints, states: SearchStates) -> Flags:
        """Whether states can still become a pipeline within the user's limits."""
        completable = states.demand <= self.most_demand[targets]
        limits = self.limits
        if limits.max_workers is not None:
            completable &= states.workers + self.need[targets] <= limits.max_workers
        if (most := limits.exact_stages or limits.max_stages) is not None:
            completable &= states.stages + (targets > 0) <= most
        if self.terms.pinned and limits.exact_stages is not None:
            completable &= self.terms.respects_pins(targets, limits.exact_stages - states.stages)
        if self.batch is not None and states.times is not None:
            completable &= self.batch.reaches(targets, states.times, states.first)
        return completable

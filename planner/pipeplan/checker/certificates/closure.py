"""Checks that the states of a certificate are closed. docs/proof.md proves the rules.

If a stage within the threshold can be put in front of a listed state, a listed state must cover the resulting state. No
stage may complete a pipeline.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.certificates.flush_stages import FlushSpace
from pipeplan.checker.certificates.shared_loads import SharedLevel, card_levels, core_levels
from pipeplan.checker.certificates.stages import CertificateStates, LeadingStages, StagesAtCut, StageSpace
from pipeplan.checker.certificates.states import covered, read_states
from pipeplan.checker.certificates.worker_runs import WorkerRuns
from pipeplan.checker.document import CheckedOptions, PlanDocument
from pipeplan.checker.model import CheckedModel, Flags, Totals
from pipeplan.errors import InputError
from pipeplan.util.files import Node

Ints = NDArray[np.intp]

MOST_CUTS = 5000
"""Largest number of cuts of a model for which a certificate is checked."""
MOST_WORKERS = 256
"""Largest number of workers of one copy. The check needs tables over all pairs of workers."""


def stage_space(
    document: PlanDocument,
    model: CheckedModel,
    place: tuple[int, range],
    copies: int,
    *,
    among_s: float,
    step_times: tuple[float, float],
    grid: int | None = None,
) -> StageSpace:
    """A space of plans: pipelines in one component of a level, in `copies` components.

    `place`: (level, workers of all copies). `among_s`: time of one all-reduce among the copies. `step_times`: (longest
    time of a resource of one copy for a minibatch of this copy, or for its batch with a flush; longest time of a shared
    resource for a minibatch of all copies). `grid`: number of replicas of every stage of a uniform grid. Raises an
    `InputError` for a space that is too large to be checked.
    """
    threshold, limit = step_times
    if threshold <= 0:
        raise InputError("the certificate claims nothing: a threshold is 0")
    (level, workers), options = place, document.options
    cluster = document.cluster.inner(level, bisect_right(document.network.starts[level], workers[0]) - 1)
    if cluster.workers > MOST_WORKERS:
        raise InputError(f"a certificate is checked for at most {MOST_WORKERS} workers")
    runs = WorkerRuns.of(cluster, options.max_replicas, grid)
    levels: list[SharedLevel] = []
    if options.contention:
        levels = [*card_levels(cluster, runs, limit), *core_levels(document.cluster, runs, limit, workers)]
    totals = Totals.of(model, model.cuts(MOST_CUTS))
    kind = FlushSpace if document.flushes else StageSpace
    return kind(document, model, totals, cluster, runs, tuple(levels), copies, workers, threshold, limit, among_s)


def check_closure(space: StageSpace, entry: Node, options: CheckedOptions, grid: int | None = None) -> int:
    """Check the states of one space of plans, and return their number.

    `grid`: number of replicas of every stage of a uniform grid, which begins at the first worker. Raises an
    `InputError` that names a stage that completes a faster plan or leads to a state that is not covered.
    """
    start = space.runs.workers if grid is None else grid * (options.stages or 1)
    if start > space.runs.workers or not len(space.runs.start):
        entry.fail(f"a uniform grid of {start} workers is larger than the cluster, or has more replicas than asked for")
    listed, as_stated = read_states(entry, space, start)
    closure = Closure(space, listed, as_stated, entry)
    for cut in np.unique(listed.cut)[::-1].tolist():
        if cut:
            closure.check_cut(cut)
    return len(listed.cut)


@dataclass(frozen=True)
class Closure:
    """The certificate's claim for one space of plans."""

    space: StageSpace
    listed: CertificateStates
    as_stated: list[Any]
    entry: Node

    def check_cut(self, cut: int) -> None:
        """Check all stages in front of the states at a cut. Raises an `InputError` if a resulting state is not
        covered.
        """
        rows = np.flatnonzero(self.listed.cut == cut)
        states, stages = self.listed.take(rows), self.space.stages(cut)
        for leads in self.space.leads(stages, states):
            self._check_leads(stages, states, leads, rows)

    def _check_leads(self, stages: StagesAtCut, states: CertificateStates, leads: LeadingStages, rows: Ints) -> None:
        found, allowed = self._resulting(stages, states, leads)
        leads, found = leads.take(allowed), found.take(allowed)
        done = found.cut == 0
        met = done & (found.stages == (self.space.most_stages or 0)) if self.space.same_stages else done
        if met.any():
            self._fail(stages, leads, rows, int(np.flatnonzero(met)[0]), "completes a faster plan in front of")
        going = np.flatnonzero(~done & ~self._hopeless(found))
        going = going[_least(found.take(going))]
        for cut in np.unique(found.cut[going]).tolist():
            mine = going[found.cut[going] == cut]
            listed = self.listed.take(self.listed.cut == cut)
            missing = mine[~covered(self.space, found.take(mine), listed)]
            if len(missing):
                what = "leads to no state of the certificate in front of"
                self._fail(stages, leads, rows, int(missing[0]), what)

    def _resulting(
        self, stages: StagesAtCut, states: CertificateStates, leads: LeadingStages
    ) -> tuple[CertificateStates, Flags]:
        """(states that stages lead to, whether each is within the user's limits)."""
        run, space = stages.traffic.run[leads.stage], self.space
        replicas, before = self.space.runs.replicas[run], stages.before[leads.stage]
        number = states.stages[leads.state] + (space.most_stages is not None)
        busy = states.busy[leads.state] + replicas * (space.most_busy is not None)
        first = self.space.runs.start[run]
        found = CertificateStates(before, first, replicas, leads.demand, leads.loads, leads.times, number, busy)
        allowed = (number <= (space.most_stages or 0)) & (busy <= (space.most_busy or 0))
        for name, stage in space.document.options.pins if space.same_stages else ():
            # The layers inside the cut belong to stages that are not placed yet.
            held = space.totals.holds(before, space.model.names.index(name))
            allowed &= held == (stage <= (space.most_stages or 0) - number)
        return found, allowed

    def _hopeless(self, found: CertificateStates) -> Flags:
        """Whether each state is hopeless: no pipeline can be completed in front of it."""
        room = found.first if self.space.most_busy is None else self.space.most_busy - found.busy
        lost = self.space.hopeless(found.cut, found.first, room, found.times)
        most = self.space.most_stages
        return lost if most is None else lost | (found.stages == most)

    def _fail(self, stages: StagesAtCut, leads: LeadingStages, rows: Ints, lead: int, what: str) -> None:
        stage, cuts = int(leads.stage[lead]), self.space.totals.cuts
        members, run = cuts[stages.cut] & ~cuts[int(stages.before[stage])], int(stages.traffic.run[stage])
        first, last = int(self.space.runs.start[run]), int(self.space.runs.end[run]) - 1
        words = stage_words(self.space.model, members, first, last)
        self.entry.fail(f"{words} {what} state {self.as_stated[int(rows[leads.state[lead]])]}")


def _least(found: CertificateStates) -> Ints:
    """The rows without those that another row covers trivially: it has the same place and counts, and no more demand
    and load.
    """
    place = np.stack([found.cut, found.first, found.replicas, found.stages, found.busy])
    costs = np.stack([found.demand, *found.times.T, *found.loads.T])
    order = np.lexsort((costs.sum(axis=0), *place))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (np.diff(place[:, order], axis=1) != 0).any(axis=0)
    best = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return np.asarray(order[begins | (costs[:, best] > costs[:, order]).any(axis=0)])


def stage_words(model: CheckedModel, members: int, first: int, last: int) -> str:
    """A stage in words, for error messages. `members`: its layers, as a bit set."""
    names = [name for index, name in enumerate(model.names) if members >> index & 1]
    layers = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    return f"a stage of {layers} on worker {first}" + (f" to {last}" if last > first else "")

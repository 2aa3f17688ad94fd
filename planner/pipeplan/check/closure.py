"""Checks that the states of a certificate are closed under adding a stage in front.

Wherever a stage that keeps within the threshold may stand in front of a state, the resulting state must be covered by a
state of the certificate. docs/check.md has the rules, and the proof that they exclude every faster pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.check import dominance
from pipeplan.check.document import Document
from pipeplan.check.model import Flags, Floats, Model
from pipeplan.check.states import States
from pipeplan.check.steps import Steps, Stretch
from pipeplan.errors import InputError
from pipeplan.files import Node

Ints = NDArray[np.intp]

LARGEST_TABLE = 1 << 27
"""Largest number of entries of the table of demands, about 1 GiB."""


@dataclass(frozen=True)
class _Closure:
    """The certificate's claim for one space of plans, with the tables needed to check it."""

    entry: Node
    steps: Steps
    states: States
    several: bool
    """Whether plans of one stage are left out."""
    least: Floats
    """The least demand among the states that dominate a state, an array indexed by the state's cut, first worker,
    level, stages, busy workers and replicas; infinite where there is none."""


def check(
    document: Document, model: Model, entry: Node, level: int, copies: int, threshold: float, among_s: float
) -> int:
    """Check the states of one space of plans, and return their number.

    `threshold`, in seconds per minibatch of one copy, is the pace that no pipeline may reach; `among_s` is the time of
    one all-reduce among the copies. Raises an `InputError` that names a stage which completes a faster plan, or leads
    to a state that the certificate does not cover.
    """
    steps = Steps.of(document, model, level, copies, threshold, among_s)
    states = States.of(entry, steps, document.asked)
    closure = _Closure(entry, steps, states, document.several, _least_demand(steps, states))
    for cut in np.unique(states.cut):
        at_cut = np.flatnonzero(states.cut == cut)
        stretch = steps.behind(int(cut), states.first[at_cut])
        for state in at_cut:
            _check_state(closure, stretch, int(state))
    return len(states.cut)


@dataclass(frozen=True)
class _Leads:
    """Stages that may stand in front of one state, and the states that they lead to. Arrays with one entry a stage."""

    taken: Ints
    """Indices of the stages in the stretch."""
    demand: Floats
    """Demand of the resulting states."""
    stages: Ints
    """Number of stages of the resulting states."""
    busy: Ints
    """Number of busy workers of the resulting states."""

    def take(self, rows: Ints | Flags) -> _Leads:
        """The entries that `rows` selects."""
        return _Leads(self.taken[rows], self.demand[rows], self.stages[rows], self.busy[rows])


def _check_state(closure: _Closure, stretch: Stretch, state: int) -> None:
    """Check all stages that may stand in front of a state. Raises an `InputError` where one is not covered."""
    states, steps = closure.states, closure.steps
    allowed = _allowed(closure, stretch, state)
    done = stretch.before[allowed.taken] == 0
    met = done & (allowed.stages == states.most_stages) if states.same_stages else done
    if met.any():
        step = steps.words(stretch, int(allowed.taken[np.flatnonzero(met)[0]]))
        closure.entry.fail(f"{step} completes a faster plan in front of state {states.as_stated[state]}")
    going = allowed.take(~done & ~_hopeless(closure, stretch, allowed))
    to, lanes = going.taken, stretch.replicas[going.taken] * states.counts_replicas
    known = closure.least[stretch.before[to], stretch.start[to], stretch.span[to], going.stages, going.busy, lanes]
    missing = np.flatnonzero(known > going.demand)
    if len(missing):
        step = steps.words(stretch, int(to[missing[0]]))
        closure.entry.fail(f"{step} in front of state {states.as_stated[state]} leads to no state of the certificate")


def _allowed(closure: _Closure, stretch: Stretch, state: int) -> _Leads:
    """The stages that fit in front of a state and are within the user's limits."""
    states, steps = closure.states, closure.steps
    taken, demand = steps.taken(
        stretch,
        int(states.first[state]),
        int(states.span[state]),
        float(states.demand[state]),
        float(states.replicas[state]),
    )
    stages = np.full(len(taken), states.stages[state] + states.counts_stages)
    busy = states.busy[state] + stretch.replicas[taken] * states.counts_busy
    within = (stages <= states.most_stages) & (busy <= states.most_busy)
    if closure.several and int(states.cut[state]) == len(steps.cuts) - 1:
        within &= stretch.before[taken] > 0
    for layer, stage in states.pins:
        # The layers inside the cut are those of the stages still to be placed.
        within &= steps.totals.holds(stretch.before[taken], layer) == (stage <= states.most_stages - stages)
    return _Leads(taken, demand, stages, busy).take(within)


def _hopeless(closure: _Closure, stretch: Stretch, leads: _Leads) -> Flags:
    """Whether each stage leads to a state in front of which no pipeline can exist."""
    states = closure.states
    room = stretch.start[leads.taken]
    if states.counts_busy:
        room = np.minimum(room, states.most_busy - leads.busy)
    lost = closure.steps.hopeless(stretch.before[leads.taken], room, leads.demand)
    return lost | (leads.stages == states.most_stages) if states.counts_stages else lost


def _least_demand(steps: Steps, states: States) -> Floats:
    """The table `_Closure.least`. Raises an `InputError` where it would be too large."""
    counts = states.most_stages + 1, states.most_busy + 1, (steps.workers if states.counts_replicas else 0) + 1
    shape = (len(steps.cuts), steps.workers, len(steps.rates.spans), *counts)
    if np.prod(shape, dtype=float) > LARGEST_TABLE:
        raise InputError("the certificate is of a model or a cluster too large to check")
    least = np.full(shape, np.inf)
    known: dict[tuple[int, int], Flags] = {}
    # No stage leads to the cut of all layers.
    for state in np.flatnonzero(states.cut < len(steps.cuts) - 1):
        key = int(states.first[state]), int(states.span[state])
        if key not in known:
            known[key] = dominance.replaced(steps.rates, key)
        stages, busy = int(states.stages[state]), int(states.busy[state])
        behind = slice(stages, stages + 1 if states.same_stages else None)
        replicas = slice(int(states.replicas[state]) + 1 if states.counts_replicas else None)
        part = least[int(states.cut[state])][:, :, behind, busy:, replicas]
        part[known[key]] = np.minimum(part[known[key]], states.demand[state])
    return least

"""Whether the states of a certificate are closed: wherever a quick enough stage leads from one, there is another.

The rules, and the proof that they exclude every quicker pipeline, are in docs/check.md.
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


@dataclass(frozen=True)
class _Closure:
    """The claim for one space of plans."""

    entry: Node
    steps: Steps
    states: States
    several: bool
    """Whether plans of one stage are left out."""
    least: Floats
    """The least demand among the states that stand for a state, by its cut, first worker, level, stages, busy workers
    and replicas."""


def check(
    document: Document, model: Model, entry: Node, level: int, copies: int, threshold: float, among_s: float
) -> int:
    """How many states were checked; an `InputError` names one that a stage leads out of, or to a quicker plan.

    `threshold`, in seconds per minibatch of one copy, is what the pipelines would have to stay within; `among_s` is one
    all-reduce among the copies.
    """
    steps = Steps.of(document, model, level, copies, threshold, among_s)
    states = States.of(entry, steps, document.asked)
    closure = _Closure(entry, steps, states, document.several, _least_demand(steps, states))
    for cut in np.unique(states.cut):
        here = np.flatnonzero(states.cut == cut)
        stretch = steps.behind(int(cut), states.first[here])
        for state in here:
            _check_state(closure, stretch, int(state))
    return len(states.cut)


@dataclass(frozen=True)
class _Leads:
    """Stages in front of one state, by their index in the stretch, with what each leads to."""

    taken: Ints
    demand: Floats
    stages: Ints
    busy: Ints

    def take(self, rows: Ints | Flags) -> _Leads:
        """Some of them."""
        return _Leads(self.taken[rows], self.demand[rows], self.stages[rows], self.busy[rows])


def _check_state(closure: _Closure, stretch: Stretch, state: int) -> None:
    """Check all stages that may stand in front of a state."""
    states, steps = closure.states, closure.steps
    allowed = _allowed(closure, stretch, state)
    done = stretch.before[allowed.taken] == 0
    met = done & (allowed.stages == states.most_stages) if states.same_stages else done
    if met.any():
        step = steps.words(stretch, int(allowed.taken[np.flatnonzero(met)[0]]))
        closure.entry.fail(f"{step} completes a quicker plan in front of state {states.given[state]}")
    going = allowed.take(~done & ~_hopeless(closure, stretch, allowed))
    to, lanes = going.taken, stretch.replicas[going.taken] * states.counts_replicas
    known = closure.least[stretch.before[to], stretch.start[to], stretch.span[to], going.stages, going.busy, lanes]
    missing = np.flatnonzero(known > going.demand)
    if len(missing):
        step = steps.words(stretch, int(to[missing[0]]))
        closure.entry.fail(f"{step} in front of state {states.given[state]} leads to no state of the certificate")


def _allowed(closure: _Closure, stretch: Stretch, state: int) -> _Leads:
    """The stages that fit in front of a state, and that the user's limits allow."""
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
        # Before the cut lie just the layers of the stages that are missing.
        within &= steps.totals.holds(stretch.before[taken], layer) == (stage <= states.most_stages - stages)
    return _Leads(taken, demand, stages, busy).take(within)


def _hopeless(closure: _Closure, stretch: Stretch, leads: _Leads) -> Flags:
    """Which of the stages lead to states in front of which there can be no pipeline."""
    states = closure.states
    room = stretch.start[leads.taken]
    if states.counts_busy:
        room = np.minimum(room, states.most_busy - leads.busy)
    lost = closure.steps.hopeless(stretch.before[leads.taken], room, leads.demand)
    return lost | (leads.stages == states.most_stages) if states.counts_stages else lost


def _least_demand(steps: Steps, states: States) -> Floats:
    counts = states.most_stages + 1, states.most_busy + 1, (steps.workers if states.counts_replicas else 0) + 1
    shape = (len(steps.cuts), steps.workers, len(steps.rates.spans), *counts)
    if np.prod(shape, dtype=float) > LARGEST_TABLE:
        raise InputError("the certificate is of a model or a cluster too large to check")
    least = np.full(shape, np.inf)
    known: dict[tuple[int, int], Flags] = {}
    # No stage leads to the cut of everything.
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

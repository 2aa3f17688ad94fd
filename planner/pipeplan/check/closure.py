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
    closure = _Closure(entry, steps, states, _least_demand(steps, states))
    for cut in np.unique(states.cut):
        here = np.flatnonzero(states.cut == cut)
        stretch = steps.behind(int(cut), states.first[here])
        for state in here:
            _check_state(closure, stretch, int(state))
    return len(states.cut)


def _check_state(closure: _Closure, stretch: Stretch, state: int) -> None:
    """Check all stages that may stand in front of a state."""
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
    for layer, stage in states.pins:
        # Before the cut lie just the layers of the stages that are missing.
        within &= steps.totals.holds(stretch.before[taken], layer) == (stage <= states.most_stages - stages)
    within = np.flatnonzero(within)
    taken, demand, stages, busy = taken[within], demand[within], stages[within], busy[within]
    done = stretch.before[taken] == 0
    met = done & (stages == states.most_stages) if states.same_stages else done
    if met.any():
        step = steps.words(stretch, int(taken[np.flatnonzero(met)[0]]))
        closure.entry.fail(f"{step} completes a quicker plan in front of state {states.given[state]}")
    room = stretch.start[taken]
    if states.counts_busy:
        room = np.minimum(room, states.most_busy - busy)
    hopeless = steps.hopeless(stretch.before[taken], room, demand)
    if states.counts_stages:
        hopeless |= stages == states.most_stages
    on = np.flatnonzero(~done & ~hopeless)
    to = taken[on]
    lanes = stretch.replicas[to] * states.counts_replicas
    known = closure.least[stretch.before[to], stretch.start[to], stretch.span[to], stages[on], busy[on], lanes]
    missing = np.flatnonzero(known > demand[on])
    if len(missing):
        step = steps.words(stretch, int(to[missing[0]]))
        closure.entry.fail(f"{step} in front of state {states.given[state]} leads to no state of the certificate")


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

"""Reads the states of a certificate, and decides which states cover others.

docs/proof.md states the rule and proves it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.certificates.stages import CertificateStates, StageSpace
from pipeplan.checker.model import Flags, Floats
from pipeplan.util.files import LARGEST, Node

Ints = NDArray[np.intp]

DEMAND_SLACK = 1e-14
"""Relative amount by which demands are lowered, so that a sum in another order does not exceed them."""
LOAD_SLACK = 2e-13
"""Loads and times are lowered by this share of the limit, once for every cut between the state and the output."""


def read_states(entry: Node, space: StageSpace, start: int) -> tuple[CertificateStates, list[Any]]:
    """(states of one space of plans, the same as written in the certificate, for error messages).

    `start`: the number of workers in front of the state in which nothing is placed yet. Raises an `InputError` if a
    state is malformed or impossible.
    """
    cuts = _cut_indices(entry["cuts"], space.totals.cuts)
    counted = [space.most_stages is not None, space.most_busy is not None]
    ends = 4 + space.parts, 4 + space.parts + sum(level.width for level in space.levels)
    width = ends[1] + sum(counted)
    rows = _number_rows(entry["states"], width, slice(3, ends[1]))
    if len(rows) and not (rows[:, 0] < len(cuts)).all():
        entry["states"].fail(f"a state names a cut beyond the {len(cuts)} of this space")
    whole = rows[:, [0, 1, 2, *range(ends[1], width)]].astype(np.intp)
    nothing = np.zeros(len(rows), dtype=np.intp)
    # Because of the slack, the states claim less than stated, and the same sum in another order does not exceed it.
    states = CertificateStates(
        cut=cuts[whole[:, 0]],
        first=whole[:, 1],
        replicas=whole[:, 2],
        demand=rows[:, 3] * (1 - DEMAND_SLACK) * space.covers,
        loads=_lowered(rows[:, ends[0] : ends[1]], space.limit_s, cuts[whole[:, 0]], space),
        times=_lowered(rows[:, 4 : ends[0]], space.threshold, cuts[whole[:, 0]], space),
        stages=whole[:, 3] if counted[0] else nothing,
        busy=whole[:, -1] if counted[1] else nothing,
    )
    _check(states, space, start, entry["states"])
    # If the first worker begins a component, no stage in front can use the component, and its load has no meaning.
    placed = states.cut < space.last
    for level, part in space.columns:
        edge = np.ones(len(rows), dtype=bool)
        edge[placed] = states.first[placed] == level.begin[level.home[states.first[placed]]]
        states.loads[edge, part] = 0.0
    return states, entry["states"].value


def _cut_indices(node: Node, cuts: list[int]) -> NDArray[np.intp]:
    """The indices, among the model's cuts, of the cuts that the certificate lists as hexadecimal bit sets."""
    known = {cut: index for index, cut in enumerate(cuts)}
    indices = []
    for item in node.items():
        try:
            indices.append(known[int(item.text(), 16)])
        except (KeyError, ValueError):
            item.fail(f"{item.value!r} is no cut of the model")
    return np.array(indices, dtype=np.intp)


def _number_rows(node: Node, width: int, fractions: slice) -> Floats:
    """The states as a table of numbers that are not negative, and whole except in the columns `fractions`."""
    if {len(item.value) if isinstance(item.value, list) else 0 for item in node.items()} != {width}:
        node.fail(f"expected states of {width} numbers each")
    if any(isinstance(value, bool) or not isinstance(value, int | float) for row in node.value for value in row):
        node.fail("expected only numbers in states")
    if not all(0 <= value <= LARGEST for row in node.value for value in row):
        node.fail("a state has a negative or an excessive number")
    rows = np.array(node.value, dtype=float)
    whole = np.delete(rows, fractions, axis=1)
    if (whole != np.floor(whole)).any():
        node.fail("a state has a fractional number where only the demand may be one")
    return rows


def _lowered(values: Floats, limit_s: float, cut: Ints, space: StageSpace) -> Floats:
    """Loads or times of states at these cuts, lowered so that rounding cannot raise them above the listed values.

    Each value is a difference of sums over the layers before two cuts, so its rounding error is relative to these sums,
    not to the value. Every further stage rounds again, so the slack grows with every cut.
    """
    return np.maximum(values - LOAD_SLACK * limit_s * (space.last - cut)[:, None], 0.0)


def _check(states: CertificateStates, space: StageSpace, start: int, node: Node) -> None:
    """Raise an `InputError` if a state lies beyond the cluster or the limits, if it completes a pipeline, or if the
    starting state is missing.
    """
    begins = states.cut == space.last
    placed = (states.replicas >= 1) & (states.first + states.replicas <= start)
    nothing = (states.first == start) & (states.replicas == 0) & (states.stages == 0) & (states.busy == 0)
    if not np.where(begins, nothing, placed).all():
        node.fail("a state lies beyond the cluster")
    if (states.stages > (space.most_stages or 0)).any() or (states.busy > (space.most_busy or 0)).any():
        node.fail("a state has more stages or workers behind it than were asked for")
    if ((states.cut == 0) & ((states.stages == (space.most_stages or 0)) | (not space.same_stages))).any():
        node.fail("a state has no layer left in front of it: it claims that a faster plan exists")
    if not begins.any():
        node.fail("the state where nothing is placed yet is missing")


def covered(space: StageSpace, leads: CertificateStates, listed: CertificateStates) -> Flags:
    """Which of the states are covered by a listed state. All states have the same cut."""
    runs, found = space.runs, np.zeros(len(leads.first), dtype=bool)
    last = leads.first + leads.replicas - 1
    # Workers before the end of this component meet the stages in front at no higher level.
    joined = runs.level[np.maximum(leads.first - 1, 0), last]
    stop = runs.stop[np.maximum(leads.first - 1, 0), last]
    # For each level: the components of the states, and whether those of the listed states stay within the limit alone.
    levels = [
        (
            level,
            part,
            level.home[leads.first],
            level.home[listed.first],
            level.alone(listed.first, listed.replicas, space.traffic_of(listed.cut), listed.loads[:, part]),
        )
        for level, part in space.columns
    ]
    for index in range(len(listed.first)):
        first, replicas = int(listed.first[index]), int(listed.replicas[index])
        covers = (listed.demand[index] <= leads.demand) & (first >= leads.first) & (first + replicas <= stop)
        covers &= runs.no_slower((first, first + replicas - 1), leads.first, last, joined)
        covers &= listed.busy[index] <= leads.busy
        same = listed.stages[index] == leads.stages
        covers &= same if space.same_stages else listed.stages[index] <= leads.stages
        if space.document.options.boundary == "parallel":
            covers &= replicas >= leads.replicas
        if space.parts:
            covers &= (listed.times[index] <= leads.times).all(axis=1)
        for level, part, mine, theirs, alone in levels:
            less = (listed.loads[index, part] <= leads.loads[:, part]).all(axis=1) & (mine == theirs[index])
            edge = leads.first == level.begin[mine]
            if not level.cores:
                inside = first + replicas <= level.stop[theirs[index]]
                alike = inside & (leads.first + leads.replicas <= level.stop[mine])
                alike |= (leads.first == first) & (leads.replicas == replicas)
                covers &= np.where(edge, alone[index], less & alike)
            else:
                covers &= less | (alone[index] & (edge | (theirs[index] > mine)))
        found |= covers
    return found

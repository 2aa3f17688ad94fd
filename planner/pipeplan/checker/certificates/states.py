"""Reads the states of a certificate into arrays, and decides which states dominate which others.

docs/check.md states the lemma on dominance and proves it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.certificates.transitions import Transitions
from pipeplan.checker.document import CheckedOptions
from pipeplan.checker.model import Flags, Floats
from pipeplan.checker.network import UniformRates
from pipeplan.util.files import LARGEST, Node

Ints = NDArray[np.intp]
DEMAND_SLACK = 1e-14
"""Relative amount by which demands are lowered, so that a sum in another order does not exceed them."""


@dataclass(frozen=True)
class CertificateStates:
    """The states of one space of plans, one array entry for each state."""

    cut: Ints
    """The cut, as an index into the cuts of the model."""
    first: Ints
    """First worker of the stage behind the cut."""
    span: Ints
    """Level of the smallest component that holds that stage."""
    demand: Floats
    """Minibatches that a stage in front must cover; 0 where memory does not limit the depths."""
    stages: Ints
    """Number of stages behind the cut; 0 where stages are not counted."""
    busy: Ints
    """Number of workers of those stages; 0 where workers are not counted."""
    replicas: Floats
    """Replicas of the stage behind the cut; infinite where boundaries do not depend on them."""
    as_stated: list[Any]
    """The states as the certificate states them, for error messages."""
    counts_stages: bool
    """Whether stages are counted, because the options limit their number."""
    counts_busy: bool
    """Whether busy workers are counted, because the options limit their number."""
    counts_replicas: bool
    """Whether the speed of a boundary depends on the replicas on both sides."""
    most_stages: int
    """Largest number of stages; 0 where stages are not counted."""
    most_busy: int
    """Largest number of busy workers; 0 where workers are not counted."""
    same_stages: bool
    """Whether a state dominates only states with the same number of stages behind the cut, not those with more."""
    pins: tuple[tuple[int, int], ...]
    """(layer, stage counted from 1) for layers that must be in a given stage, where the number of stages is known."""

    @staticmethod
    def of(entry: Node, steps: Transitions, options: CheckedOptions) -> CertificateStates:
        """Read the states of one space of plans. Raises an `InputError` where one is malformed or impossible."""
        cuts = cut_indices(entry["cuts"], steps.cuts)
        rows = number_rows(entry["states"], range(4, 8), "states of 4 to 7 numbers each, all alike")
        width = rows.shape[1]
        as_stated = entry["states"].value
        most_stages = (options.stages or options.max_stages) if width > 4 else None
        most_busy = options.max_workers if width > 5 else None
        if len(rows) and not (rows[:, 0] < len(cuts)).all():
            entry["states"].fail(f"a state names a cut beyond the {len(cuts)} of this space")
        cut = cuts[rows[:, 0].astype(np.intp)]
        lanes = steps.parallel and width > 6
        same = most_stages is not None and options.stages is not None
        states = CertificateStates(
            cut=cut,
            first=rows[:, 1].astype(np.intp),
            span=rows[:, 2].astype(np.intp),
            demand=rows[:, 3] * (1 - DEMAND_SLACK) * steps.covers,
            stages=(rows[:, 4] if most_stages is not None else np.zeros(len(rows))).astype(np.intp),
            busy=(rows[:, 5] if most_busy is not None else np.zeros(len(rows))).astype(np.intp),
            replicas=rows[:, 6] if lanes else np.full(len(rows), np.inf),
            as_stated=as_stated,
            counts_stages=most_stages is not None,
            counts_busy=most_busy is not None,
            counts_replicas=lanes,
            most_stages=most_stages or 0,
            most_busy=min((most_busy or 0) // steps.copies, steps.workers),
            same_stages=same,
            pins=tuple((steps.model.names.index(name), stage) for name, stage in options.pins) if same else (),
        )
        _check(states, steps, entry["states"])
        return states


def cut_indices(node: Node, cuts: list[int]) -> NDArray[np.intp]:
    """The indices, among the cuts of the model, of those that the certificate lists as hexadecimal bit sets."""
    known = {cut: index for index, cut in enumerate(cuts)}
    indices = []
    for item in node.items():
        try:
            indices.append(known[int(item.text(), 16)])
        except (KeyError, ValueError):
            item.fail(f"{item.value!r} is no cut of the model")
    return np.array(indices, dtype=np.intp)


def number_rows(node: Node, widths: Container[int], expected: str, fractions: slice = slice(3, 4)) -> Floats:
    """The states as a table of numbers that are not negative, and whole but for the columns `fractions`."""
    lengths = {len(item.value) if isinstance(item.value, list) else 0 for item in node.items()}
    if len(lengths) != 1 or any(length not in widths for length in lengths):
        node.fail(f"expected {expected}")
    if any(isinstance(value, bool) or not isinstance(value, int | float) for row in node.value for value in row):
        node.fail("expected only numbers in states")
    if not all(0 <= value <= LARGEST for row in node.value for value in row):
        node.fail("a state has a negative or an excessive number")
    rows = np.array(node.value, dtype=float)
    whole = np.delete(rows, fractions, axis=1)
    if (whole != np.floor(whole)).any():
        node.fail("a state has a fractional number where only the demand may be one")
    return rows


def _check(states: CertificateStates, steps: Transitions, node: Node) -> None:
    """Raise an `InputError` where a state lies beyond the cluster or the limits, or completes a pipeline, or where the
    starting state is missing."""
    last = len(steps.cuts) - 1
    inside = (states.first < steps.workers) | (states.cut == last)
    if not (inside & (states.first <= steps.workers) & (states.span < len(steps.rates.spans))).all():
        node.fail("a state lies beyond the cluster")
    if (states.stages > states.most_stages).any() or (states.busy > states.most_busy).any():
        node.fail("a state has more stages or workers behind it than were asked for")
    met = (states.cut == 0) & ((states.stages == states.most_stages) | (not states.same_stages))
    if met.any():
        node.fail("a state has no layer left in front of it: it claims that a faster plan exists")
    start = (states.cut == last) & (states.first == steps.workers) & (states.stages == 0) & (states.busy == 0)
    if not start.any():
        node.fail("the state where nothing is placed yet is missing")


def dominates(rates: UniformRates, other: tuple[int, int], state: tuple[int, int]) -> bool:
    """Whether every stage that fits in front of `state` also fits in front of `other`, as far as links decide.

    A state is given as (its first worker, the level that its first stage spans); workers count from 0.
    """
    (first, span), (other_first, other_span) = state, other
    if first == 0:
        return True  # No stage fits in front of the first worker.
    # Every stage in front is joined with this state's first stage at this level or a higher one.
    joined = max(span, rates.level(first - 1, first))
    if other_first < first or other_span > joined:
        return False
    while (apart := rates.level(first, other_first)) > joined:
        # The two lie in different components inside one component of level `apart`. Stages in front of `state` in its
        # component can be moved by the same distance as the state itself, so compare positions inside a component.
        size = rates.spans[apart - 1]
        first, other_first = first % size, other_first % size
        if other_first < first:
            return False
    return True


def dominated_states(rates: UniformRates, other: tuple[int, int]) -> Flags:
    """Flags of the states that `other` dominates, by the first worker and the level of the dominated state."""
    workers, levels = range(rates.spans[-1]), range(len(rates.spans))
    return np.array([[dominates(rates, other, (first, span)) for span in levels] for first in workers])

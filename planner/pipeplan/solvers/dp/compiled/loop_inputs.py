"""The input of the loops: the terms of the cost model and the limits of one search, as plain numbers and arrays.

Compiled functions pass numbers at no cost, and every array at some; so all numbers are in one tuple, and functions get
only the arrays that they need.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SearchLimits
from pipeplan.solvers.dp.search_states import SearchStates
from pipeplan.solvers.dp.stage_costs import CostTerms
from pipeplan.solvers.dp.topology import ComponentLayout
from pipeplan.solvers.dp.worker_bounds import WorkerBounds

WORK, FORWARD, PARAMETERS, BUFFERS, SAVED, SENT, RETURNED = range(7)
"""Columns of `CutArrays.totals`, by their names in `Cuts`."""

BANDWIDTH, LATENCY = range(2)
"""Columns of `CutArrays.rates`."""


class Search(Protocol):
    """The part of `UniformSearch`, which calls the loops, that they need."""

    terms: CostTerms
    limits: SearchLimits
    layout: ComponentLayout
    threshold: float
    within: float
    last: int
    kept: dict[int, SearchStates]
    need: Ints
    widest: Ints
    usable: Flags
    bounds: WorkerBounds | None

    @property
    def counts_depths(self) -> bool:
        """Whether minibatches in flight matter."""

    @property
    def compares_cuts(self) -> bool:
        """Whether cuts may be left out that a smaller one makes superfluous."""

    def start(self) -> SearchStates:
        """The state at the full cut."""

    def open_states(self, states: SearchStates) -> tuple[SearchStates, Ints]:
        """The states that another stage may be put in front of, and their rows."""

    def completable(self, targets: Ints, states: SearchStates) -> tuple[Ints, SearchStates]:
        """The states that may still become a pipeline, with the cut of each."""

    def workers_for_memory(self, targets: Ints, demand: Floats) -> Floats:
        """The least workers that stages in front of cuts need for their memory, given the demands."""


class Given(NamedTuple):
    """The numbers of a problem and of one search; names that are not explained are those of `CostTerms`."""

    last: int
    """Index of the full cut."""
    chain: bool
    """Whether every cut contains all before it."""
    pass_s: float
    """The times of `ExecutorCosts`, with the next five."""
    message_s: float
    message_byte_s: float
    version_byte_s: float
    sample_s: float
    step_s: float
    steps: float
    """The optimiser's steps per minibatch (`Options.update_share`)."""
    speed: float
    overlap: float
    capacity: float
    state_ratio: float
    divided_ratio: float
    copied_share: float
    copies_allreduce_s: float
    training: bool
    passes: int
    copies: int
    copies_per_version: int
    constant_versions: int
    stashes: int
    accumulate: int
    """Minibatches per synchronisation; 0 where a stage synchronises once for its replicas' group."""
    most_replicas: int
    threshold: float
    within: float
    """The threshold with the slack for rounding."""
    memory: bool
    """Whether memory is limited."""
    compares_cuts: bool
    """Whether cuts may be left out that a smaller one makes superfluous (`Search.compares_cuts`)."""
    variants: int
    """2 where stages may recompute their forward pass, else 1."""
    only: int
    """The one number of replicas that is allowed; 0 for any."""


class CutArrays(NamedTuple):
    """The arrays of a problem and of one search over its cuts and the levels of its cluster."""

    totals: Floats
    """A row for each cut, so that one access to memory brings all that a stage needs of it."""
    words: NDArray[np.uint64]
    """`Cuts.words`: the units inside every cut."""
    need: Ints
    """The workers in front of every cut that its work needs."""
    usable: Flags
    """Whether a stage may begin at a cut."""
    downhill_begins: Ints
    """For every cut, where its smaller cuts begin in `downhill`; a further entry closes the last."""
    downhill: Ints
    """The smaller cuts of the pairs of `Cuts.downhill`."""
    shared_members: Ints
    """`SharedInCuts.members`, without rows where no weights are shared; so are the next two."""
    shared_first: Ints
    shared_bytes: Floats
    transfer_s: Floats
    """`CostTerms.transfer_s`."""
    rates: Floats
    """Bandwidth and latency of all-reduces, by level."""
    spans: Ints
    """`ComponentLayout.spans`."""


def numbers_of(search: Search) -> Given:
    """The numbers of a search and its problem."""
    terms, limits = search.terms, search.limits
    problem, costs = terms.problem, terms.problem.cluster.executor
    return Given(
        last=search.last,
        chain=bool(terms.cuts.chain),
        pass_s=float(costs.pass_s),
        message_s=float(costs.message_s),
        message_byte_s=float(costs.message_byte_s),
        version_byte_s=float(costs.version_byte_s),
        sample_s=float(costs.sample_s),
        step_s=float(costs.step_s),
        steps=float(problem.options.update_share),
        speed=float(terms.speed),
        overlap=float(problem.options.overlap),
        capacity=float(problem.capacity),
        state_ratio=float(problem.state_ratio),
        divided_ratio=float(problem.divided_ratio),
        copied_share=float(problem.copied_share),
        copies_allreduce_s=float(problem.copies_allreduce_s),
        training=bool(terms.training),
        passes=int(problem.passes),
        copies=int(problem.copies),
        copies_per_version=int(problem.options.copies_per_version),
        constant_versions=int(terms.constant_versions),
        stashes=int(terms.stashes),
        accumulate=int(terms.accumulate or 0),
        most_replicas=int(terms.most_replicas),
        threshold=float(search.threshold),
        within=float(search.within),
        memory=bool(limits.memory),
        compares_cuts=bool(search.compares_cuts),
        variants=2 if limits.recompute else 1,
        only=0 if limits.shape is None else int(limits.shape.replicas),
    )


def arrays_of(search: Search) -> CutArrays:
    """The arrays of a search and its problem."""
    terms, cuts, shared = search.terms, search.terms.cuts, search.terms.shared
    columns = (cuts.work_s, cuts.forward_s, cuts.parameters, cuts.buffers, cuts.saved, cuts.sent, cuts.returned)
    large, small = cuts.downhill if search.compares_cuts else np.zeros((2, 0), dtype=np.intp)
    none = np.zeros((0, len(cuts.ideals)), dtype=np.intp)
    return CutArrays(
        totals=np.stack(columns, axis=1),
        words=np.array(cuts.words, dtype=np.uint64),
        need=np.array(search.need, dtype=np.intp),
        usable=np.array(search.usable, dtype=bool),
        downhill_begins=np.searchsorted(large, np.arange(len(cuts.ideals) + 1)),
        downhill=np.array(small, dtype=np.intp),
        shared_members=none if shared is None else shared.members,
        shared_first=none if shared is None else shared.first,
        shared_bytes=np.zeros(0) if shared is None else shared.bytes,
        transfer_s=np.ascontiguousarray(terms.transfer_s, dtype=float),
        rates=np.stack([terms.links.allreduce_bandwidth, terms.links.allreduce_latency], axis=1).astype(float),
        spans=np.array(terms.layout.spans),
    )

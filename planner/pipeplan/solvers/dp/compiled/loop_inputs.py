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
from pipeplan.solvers.dp.states.search_states import SearchStates
from pipeplan.solvers.dp.states.worker_bounds import WorkerBounds
from pipeplan.solvers.dp.terms.batch_limit import BatchLimit
from pipeplan.solvers.dp.terms.cost_terms import CostTerms
from pipeplan.solvers.dp.terms.input_stages import AnyInputStage
from pipeplan.solvers.dp.terms.topology import ComponentLayout

WORK, FORWARD, PARAMETERS, BUFFERS, SAVED, SENT, RETURNED = range(7)
"""Columns of `CutArrays.totals`, by their names in `Cuts`."""

BANDWIDTH, LATENCY = range(2)
"""Columns of `CutArrays.rates`."""

ALIKE, EXACT_STAGES, FEWER_STAGES = range(3)
"""Ways in which the numbers of stages of two states compare (`StateCounts`)."""


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
    most_demand: Floats
    widest: Ints
    usable: Flags
    bounds: WorkerBounds | None
    batch: BatchLimit | None

    @property
    def counts_depths(self) -> bool:
        """Whether minibatches in flight matter."""

    @property
    def compares_cuts(self) -> bool:
        """Whether cuts may be left out that a smaller one makes superfluous."""

    def start(self) -> SearchStates:
        """The state at the full cut."""


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
    samples_s: float
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
    workers: int
    """The workers of the cluster, or of the uniform grid that is searched for."""
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
    idle: bool
    """Whether workers between stages may be idle."""
    bounded: bool
    """Whether there are bounds on the workers in front of the cuts (`Bounds`)."""
    compared_stages: int
    """How the numbers of stages of two states compare."""
    counts_workers: bool
    """Whether fewer busy workers are better."""
    most_stages: int
    """The most stages of a pipeline; 0 for any number. The next one is that of its workers."""
    most_workers: int
    first_replicas: int
    """Replicas of the assumed input stage under vertical sync; 0 where none is assumed."""
    first_delay: int
    first_is_exact: bool
    """Whether an input stage is assumed that has just as many replicas."""
    first_is_any: bool
    """Whether any input stage is assumed (`AnyInputStage`)."""


class CutArrays(NamedTuple):
    """The arrays of a problem and of one search over its cuts and the levels of its cluster."""

    totals: Floats
    """A row for each cut, so that one access to memory brings all that a stage needs of it."""
    words: NDArray[np.uint64]
    """`Cuts.words`: the units inside every cut."""
    need: Ints
    """The workers in front of every cut that its work needs."""
    most_demand: Floats
    """The largest demands with which an update has enough minibatches (`UniformSearch`), by cut."""
    least_memory: Floats
    """`CostTerms.least_memory`, a row for each cut."""
    widest: Ints
    """The highest level over which a cut's boundary is fast enough; -1 for the full cut, which has none."""
    pinned: Flags
    """Whether the pinned layers allow so many stages (columns) in front of a cut (rows); no columns where none are."""
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
    workspace_sizes: Floats
    """`Workspaces.sizes`; the next two are its `masks` and `ranges`."""
    workspace_masks: NDArray[np.uint64]
    workspace_ranges: Floats
    transfer_s: Floats
    """`CostTerms.transfer_s`."""
    rates: Floats
    """Bandwidth and latency of all-reduces, by level."""
    spans: Ints
    """`ComponentLayout.spans`; the next one is its `joins`."""
    joins: Ints


class Bounds(NamedTuple):
    """`WorkerBounds`, as far as they are known."""

    rows: Ints
    """By whole demand, the row of the table, or -1."""
    table: Floats
    least: float
    """The least demand that the table tells from smaller ones; the next one is the largest."""
    most: float


def numbers_of(search: Search) -> Given:
    """The numbers of a search and its problem."""
    terms, limits = search.terms, search.limits
    problem, costs = terms.problem, terms.problem.executor_costs
    counting = limits.counting
    compared_stages = EXACT_STAGES if counting.exact_stages else FEWER_STAGES if counting.stages else ALIKE
    return Given(
        last=search.last,
        chain=bool(terms.cuts.chain),
        pass_s=float(costs.pass_s),
        message_s=float(costs.message_s),
        message_byte_s=float(costs.message_byte_s),
        version_byte_s=float(costs.version_byte_s),
        samples_s=float(costs.samples_s),
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
        workers=int(terms.workers if limits.shape is None else limits.shape.workers),
        threshold=float(search.threshold),
        within=float(search.within),
        memory=bool(limits.memory),
        compares_cuts=bool(search.compares_cuts),
        variants=2 if limits.recompute else 1,
        only=0 if limits.shape is None else int(limits.shape.replicas),
        idle=limits.shape is None,
        bounded=search.bounds is not None,
        compared_stages=compared_stages,
        counts_workers=bool(counting.workers),
        most_stages=int(limits.exact_stages or limits.max_stages or 0),
        most_workers=int(limits.max_workers or 0),
        first_replicas=0 if terms.first is None else int(terms.first.replicas),
        first_delay=0 if terms.first is None else int(terms.first.delay),
        first_is_exact=terms.first is not None and not isinstance(terms.first, AnyInputStage),
        first_is_any=isinstance(terms.first, AnyInputStage),
    )


def arrays_of(search: Search) -> CutArrays:
    """The arrays of a search and its problem."""
    terms, cuts, shared = search.terms, search.terms.cuts, search.terms.shared
    columns = (cuts.work_s, cuts.forward_s, cuts.parameters, cuts.buffers, cuts.saved, cuts.sent, cuts.returned)
    large, small = cuts.downhill if search.compares_cuts else np.zeros((2, 0), dtype=np.intp)
    none = np.zeros((0, len(cuts.ideals)), dtype=np.intp)
    widest = np.array(search.widest, dtype=np.intp)
    widest[search.last] = -1
    return CutArrays(
        totals=np.stack(columns, axis=1),
        words=np.array(cuts.words, dtype=np.uint64),
        need=np.array(search.need, dtype=np.intp),
        most_demand=np.array(search.most_demand, dtype=float),
        least_memory=np.stack(terms.least_memory, axis=1).astype(float),
        widest=widest,
        pinned=_pinned(search),
        usable=np.array(search.usable, dtype=bool),
        downhill_begins=np.searchsorted(large, np.arange(len(cuts.ideals) + 1)),
        downhill=np.array(small, dtype=np.intp),
        shared_members=none if shared is None else shared.members,
        shared_first=none if shared is None else shared.first,
        shared_bytes=np.zeros(0) if shared is None else shared.bytes,
        workspace_sizes=cuts.workspaces.sizes,
        workspace_masks=cuts.workspaces.masks,
        workspace_ranges=cuts.workspaces.ranges,
        transfer_s=np.ascontiguousarray(terms.transfer_s, dtype=float),
        rates=np.stack([terms.links.allreduce_bandwidth, terms.links.allreduce_latency], axis=1).astype(float),
        spans=np.array(terms.layout.spans),
        joins=np.array(terms.layout.joins),
    )


def bounds_of(search: Search) -> Bounds:
    """The bounds of a search that are known by now."""
    if search.bounds is None:
        return Bounds(np.zeros(0, dtype=np.intp), np.zeros((0, 0)), 0.0, 0.0)
    return Bounds(search.bounds.known_rows, search.bounds.table, *search.bounds.demands)


def _pinned(search: Search) -> Flags:
    terms, stages, cuts = search.terms, search.limits.exact_stages, np.arange(search.last + 1)
    if not terms.pinned or stages is None:
        return np.zeros((len(cuts), 0), dtype=bool)
    columns = [terms.respects_pins(cuts, np.full(len(cuts), before)) for before in range(stages + 1)]
    return np.stack(columns, axis=1)

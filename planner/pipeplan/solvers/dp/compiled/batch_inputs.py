"""The input that loops have besides `loop_inputs` in a search for the fastest batch under a schedule with a flush."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from pipeplan.problem.cuts import Floats, Ints
from pipeplan.solvers.dp.compiled.loop_inputs import Search
from pipeplan.solvers.dp.terms.batch_limit import BatchLimit


class BatchSearch(Search, Protocol):
    """The part of `FlushSearch`, which calls the loops, that they need."""

    batch: BatchLimit

    @property
    def counts(self) -> Ints:
        """The numbers of replicas to try."""

    @property
    def drops_spare(self) -> bool:
        """Whether a replica that makes a stage no quicker is left out."""


class BatchNumbers(NamedTuple):
    """The numbers of a `BatchLimit` and of its search; names that are not explained are theirs."""

    minibatches: int
    phases: int
    budget_s: float
    fastest: float
    most_steady_s: float
    least_steady_s: float
    steady_from_s: float
    steady_to_s: float
    counts_depths: bool
    drops_spare: bool


class BatchArrays(NamedTuple):
    """The arrays of a `BatchLimit` and of its search."""

    passes_s: Floats
    """`BatchLimit.passes_s`, a row for each phase; `work_s` is their sum."""
    work_s: Floats
    rates: Floats
    """Bandwidth and latency of messages, by level."""
    counts: Ints
    """The numbers of replicas to try, increasing."""
    exchange_s: Floats
    """`SharedInCuts.exchange_s`, by weight."""


class Batches(NamedTuple):
    """The input that searches for batches have besides that of others."""

    numbers: BatchNumbers
    arrays: BatchArrays


def batches_of(search: BatchSearch) -> Batches:
    """The batches that a search looks for."""
    batch, links, shared = search.batch, search.terms.links, search.terms.shared
    numbers = BatchNumbers(
        minibatches=int(batch.minibatches),
        phases=int(batch.phases),
        budget_s=float(batch.budget_s),
        fastest=float(search.terms.fastest),
        most_steady_s=float(batch.most_steady_s),
        least_steady_s=float(batch.least_steady_s),
        steady_from_s=float(batch.steady_from_s),
        steady_to_s=float(batch.steady_to_s),
        counts_depths=bool(search.counts_depths),
        drops_spare=bool(search.drops_spare),
    )
    arrays = BatchArrays(
        passes_s=np.stack(batch.passes_s).astype(float),
        work_s=np.array(batch.work_s, dtype=float),
        rates=np.stack([links.sendrecv_bandwidth, links.sendrecv_latency], axis=1).astype(float),
        counts=np.array(search.counts, dtype=np.intp),
        exchange_s=np.zeros(0) if shared is None else np.array(shared.exchange_s, dtype=float),
    )
    return Batches(numbers, arrays)

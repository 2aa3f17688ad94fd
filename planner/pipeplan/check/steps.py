"""Every stage that is quick enough, by the cut that it ends at: what may stand in front of a state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.check import formulas
from pipeplan.check.document import DOUBLE_BUFFERED, STASHING, Document
from pipeplan.check.model import Flags, Floats, Model
from pipeplan.check.rates import Rates
from pipeplan.check.totals import Totals
from pipeplan.errors import InputError

Ints = NDArray[np.intp]

MOST_CUTS = 5000


@dataclass(frozen=True)
class Stretch:
    """Stages I→J for one cut J, on runs of workers, whose compute and synchronisation keep within the threshold.

    Arrays, one entry a stage.
    """

    cut: int
    """J, by index."""
    before: Ints
    """I, by index."""
    start: Ints
    end: Ints
    """One past the last worker."""
    replicas: Ints
    span: Ints
    """Level of the smallest component that holds the run."""
    aligned: Flags
    """Whether the run cannot be moved on within its component."""
    wait: Floats
    """Minibatches that go by while the replicas wait for each other."""
    late: Floats
    """Under 2BW: minibatches that go by before an update is there."""
    variants: tuple[tuple[Floats, Floats], ...]
    """Ways to hold what backward needs: bytes of one worker without and for each minibatch in flight; the first are
    infinite where the stage is not quick enough."""


@dataclass(frozen=True)
class Steps:
    """Stages of pipelines in one component of a level, one of `copies` that run side by side."""

    model: Model
    rates: Rates
    totals: Totals
    runs: NDArray[np.intp]
    """Start, length and level of every run of workers that a stage may take, one a row."""
    aligned: Flags
    """Which runs cannot be moved on within their component."""
    copies: int
    threshold: float
    """Seconds per minibatch of one copy."""
    capacity: float
    """Bytes of one worker; infinite where memory is not to limit."""
    overlap: float
    speed: float
    recompute: bool
    parallel: bool
    """Whether a boundary uses as many links as the smaller of its stages has replicas."""
    late: bool
    """Whether a late update takes a version of the weights."""
    share: int | None
    """Under 2BW: minibatches of one update in one copy."""
    among_s: float
    """One all-reduce among the copies."""

    @property
    def workers(self) -> int:
        """Workers of one component."""
        return self.rates.spans[-1]

    @property
    def cuts(self) -> list[int]:
        """All of the model, the empty one first and everything last."""
        return self.totals.cuts

    @property
    def last(self) -> int:
        """The cut of everything."""
        return len(self.cuts) - 1

    @property
    def covers(self) -> bool:
        """Whether depths matter: as far as they take memory, which those of inference do not, or 2BW limits them."""
        return self.model.training and (np.isfinite(self.capacity) or self.share is not None)

    @staticmethod
    def of(document: Document, model: Model, level: int, copies: int, threshold: float, among_s: float) -> Steps:
        """All that the stages are made from; an `InputError` where the model has too many cuts to go through."""
        asked = document.asked
        if threshold <= 0:
            raise InputError("the certificate claims nothing: a threshold is 0")
        rates = Rates.of(document.cluster.inner(level))
        runs, aligned = _runs(rates, asked.max_replicas)
        return Steps(
            model=model,
            rates=rates,
            totals=Totals.of(model, MOST_CUTS),
            runs=runs,
            aligned=aligned,
            copies=copies,
            threshold=threshold,
            capacity=document.cluster.device.memory_bytes if asked.memory else np.inf,
            overlap=asked.overlap,
            speed=document.cluster.device.speed,
            recompute=asked.recompute and model.training,
            parallel=asked.boundary == "parallel",
            # Under vertical sync there are at least as many versions as minibatches in flight; no more are counted.
            late=document.schedule == STASHING,
            share=(document.accumulate or 1) // copies if document.schedule == DOUBLE_BUFFERED else None,
            among_s=among_s,
        )

    def behind(self, cut: int, firsts: Ints) -> Stretch:
        """The stages that end at a cut, in front of states with these first workers, as far as they have to be tried.

        Left out are those in front of which no others can end, and those that end neither right before a first worker
        nor where they cannot be moved on: docs/check.md shows that these stand for the rest.
        """
        chosen = np.flatnonzero(self.aligned | np.isin(self.runs[:, 0] + self.runs[:, 1], firsts))
        runs = self.runs[chosen]
        before, (start, count, _), totals = self.totals.inside(cut), runs.T, self.totals
        kinds, kind = np.unique(runs[:, 1:], axis=0, return_inverse=True)
        (replicas, span), kind = kinds.T, kind.reshape(-1)
        forward, backward = (
            (total[cut] - total[before])[:, None] / (replicas * self.speed)
            for total in (totals.forward_s, totals.backward_s)
        )
        ring = np.zeros(forward.shape)
        if self.model.training:
            size = (totals.parameters[cut] - totals.parameters[before])[:, None]
            ring = formulas.ring(replicas, size, self.rates.allreduce[span], self.rates.latency_s[span])
        lost = self.hopeless(before[:, None], np.arange(self.workers), np.zeros(1))
        open_ = ~lost | (before == 0)[:, None]
        row, run = np.nonzero(self._quick(forward + backward, ring, replicas)[:, kind] & open_[:, start])
        at = row, kind[run]
        variants = [self._memory(cut, before[row], count[run], again=False)]
        if self.recompute:
            fixed, growing = self._memory(cut, before[row], count[run], again=True)
            quick = self._quick(2 * forward + backward, ring, replicas)[at]
            variants.append((np.where(quick, fixed, np.inf), growing))
        wait = formulas.wait(ring, self.threshold, replicas, self.copies) if self.share is None else 0.0
        late = np.maximum(0.0, (ring + self.among_s) / self.threshold - 1.0 / self.copies)
        return Stretch(
            cut=cut,
            before=before[row],
            start=start[run],
            end=(start + count)[run],
            replicas=count[run],
            span=span[kind[run]],
            aligned=self.aligned[chosen][run],
            wait=np.broadcast_to(wait, ring.shape)[at],
            late=late[at],
            variants=tuple(variants),
        )

    def _quick(self, compute_s: Floats, ring_s: Floats, replicas: Ints) -> Flags:
        """Which stages keep within the threshold; under 2BW none where a copy has no minibatch of every update."""
        if self.share == 0:
            return np.zeros(compute_s.shape, dtype=bool)
        time: Floats = formulas.together(compute_s, ring_s / (self.share or replicas), self.overlap)
        return time <= self.threshold

    def _memory(self, cut: int, before: Ints, replicas: Ints, *, again: bool) -> tuple[Floats, Floats]:
        """Bytes of one worker without and for each minibatch in flight, of stages that run forward `again` or not."""
        totals = self.totals
        weights, buffers, saved = (
            total[cut] - total[before] for total in (totals.parameters, totals.buffers, totals.saved)
        )
        crossing = totals.sent + totals.returned
        fixed = buffers + crossing[cut] + crossing[before] + weights
        if not self.model.training:
            return fixed, np.zeros(len(before))
        several = replicas * self.copies > 1
        late = several & ~((before == 0) & (cut == self.last)) & self.late
        # The optimiser's state, a flat bucket, and the versions that do not come with a minibatch in flight.
        fixed = fixed + weights * (self.model.state_ratio + several + (late if self.share is None else 2))
        growing = totals.sent[before] + weights * (self.share is None)
        once = saved + totals.sent[cut]
        return (fixed + once, growing) if again else (fixed, growing + once)

    def taken(
        self, stretch: Stretch, first: int, span: int, demand: float, next_replicas: float
    ) -> tuple[Ints, Floats]:
        """The stages that may stand in front of a state, by index, and the demand that each leads to."""
        taken = np.flatnonzero((stretch.end == first) | (stretch.aligned & (stretch.end < first)))
        transfer = np.zeros(len(taken))
        if stretch.cut != self.last:
            reach = np.array([self.rates.level(start, first) for start in range(first)], dtype=np.intp)
            level = np.maximum(reach[stretch.start[taken]], span)
            one = self.totals.busier[stretch.cut] / self.rates.message[level]
            lanes = np.minimum(stretch.replicas[taken], next_replicas) if self.parallel else 1
            near = one / lanes <= self.threshold
            taken, transfer = taken[near], (one + self.rates.latency_s[level])[near]
        replicas, wait = stretch.replicas[taken], stretch.wait[taken]
        depth = np.ones(len(taken))
        if self.covers and stretch.cut != self.last:
            depth = formulas.depth(demand, wait, transfer, self.threshold, replicas)
        fits: Flags = np.zeros(len(taken), dtype=bool)
        for fixed, growing in stretch.variants:
            fits |= fixed[taken] + depth * growing[taken] <= self.capacity
        if self.share is not None and self.covers:
            fits &= depth * replicas + stretch.late[taken] <= self.share
        leads = depth * replicas + wait if self.covers else np.zeros(len(taken))
        return taken[fits], leads[fits]

    def hopeless(self, before: Ints, room: Ints, demand: Floats) -> Flags:
        """States that no stages can be put in front of down to the empty cut, by three bounds of docs/check.md.

        `room` is how many workers there are in front that may still be busy.
        """
        totals = self.totals
        work = totals.forward_s[before] + totals.backward_s[before]
        none: Flags = (room == 0) | (work > room * self.speed * self.threshold)
        if not self.parallel and self.workers > 1:
            nearest = next(level for level, span in enumerate(self.rates.spans) if span > 1)
            none |= totals.busier[before] > self.rates.message[nearest] * self.threshold
        if self.model.training and np.isfinite(self.capacity):
            each = totals.parameters[before] * (self.share is None) + (0 if self.recompute else totals.saved[before])
            once = totals.parameters[before] * (1 + self.model.state_ratio + 2 * (self.share is not None))
            least = once + totals.buffers[before] + each * (1 + demand)
            none |= least * (1 - formulas.WHOLE) > room * self.capacity
        return none

    def words(self, stretch: Stretch, step: int) -> str:
        """A stage, for people."""
        first, last = int(stretch.start[step]), int(stretch.end[step]) - 1
        members = self.cuts[stretch.cut] & ~self.cuts[int(stretch.before[step])]
        names = [name for index, name in enumerate(self.model.names) if members >> index & 1]
        layers = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"a stage of {layers} on worker {first}" + (f" to {last}" if last > first else "")


def _runs(rates: Rates, most: int | None) -> tuple[NDArray[np.intp], Flags]:
    """Start, length and level of all runs of workers; and which of them cannot be moved on within their component.

    That is the component of their own level; a single worker may move in that which holds the one before it, too.
    """
    workers = rates.spans[-1]
    start, last = np.triu_indices(workers)
    kept = last - start < (most or workers)
    start, last = start[kept], last[kept]
    span = _level(rates, start, last)
    room = np.where(last > start, span, _level(rates, np.maximum(start - 1, 0), start))
    aligned: Flags = (last + 1) % np.array(rates.spans)[room] == 0
    # The first worker alone can always be moved on.
    aligned &= last > 0
    return np.stack([start, last - start + 1, span], axis=1), aligned


def _level(rates: Rates, first: Ints, last: Ints) -> Ints:
    level = np.zeros(first.shape, dtype=np.intp)
    for span in rates.spans[:-1]:
        level += first // span != last // span
    return level

"""The stages that keep within a threshold and may stand in front of a state, by the cut at which they end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker import figures
from pipeplan.checker.document import DOUBLE_BUFFERED, STASHING, PlanDocument
from pipeplan.checker.executor_work import executor_work_between, room_of
from pipeplan.checker.model import CheckedModel, Flags, Floats, Totals
from pipeplan.checker.network import UniformRates
from pipeplan.errors import InputError

Ints = NDArray[np.intp]

MOST_CUTS = 5000
"""Largest number of cuts of a model for which a certificate is checked."""


@dataclass(frozen=True)
class StageCandidates:
    """The stages I→J for one cut J on consecutive workers whose compute and synchronisation keep within the threshold.

    Arrays have one entry for each stage.
    """

    cut: int
    """Index of the cut J."""
    before: Ints
    """Index of the cut I."""
    start: Ints
    """First worker."""
    end: Ints
    """One past the last worker."""
    replicas: Ints
    """Number of workers."""
    span: Ints
    """Level of the smallest component that holds the workers."""
    aligned: Flags
    """Whether the workers are the last of their component, so that the stage cannot be moved towards its end."""
    wait: Floats
    """Minibatches that pass while the replicas wait for each other."""
    late: Floats
    """Under 2BW, minibatches that pass between the last backward pass of a group and its update."""
    variants: tuple[tuple[Floats, Floats], ...]
    """Memory of one worker without and with recomputation (the latter if allowed): fixed bytes, and bytes for each
    minibatch in flight. The fixed bytes are infinite where a stage is too slow with recomputation."""


@dataclass(frozen=True)
class Transitions:
    """All stages of pipelines in one component of a level, where `copies` such pipelines run side by side."""

    document: PlanDocument
    model: CheckedModel
    rates: UniformRates
    totals: Totals
    runs: NDArray[np.intp]
    """(first worker, number of workers, level) of every placement of a stage on consecutive workers, one a row."""
    aligned: Flags
    """Flags of the placements that cannot be moved towards the end of their component."""
    copies: int
    threshold: float
    """Largest pace of one copy, in seconds per minibatch."""
    capacity: float
    """Memory of one worker in bytes; infinite where memory does not limit the plan."""
    overlap: float
    """Share of synchronisation that hides behind compute."""
    speed: float
    """Speed of a device."""
    recompute: bool
    """Whether stages may recompute their forward pass."""
    parallel: bool
    """Whether a boundary uses as many links as the smaller of its two stages has replicas."""
    late: bool
    """Whether an update lag takes one more version of the weights."""
    share: int | None
    """Under 2BW, minibatches of one update in one copy; otherwise None."""
    among_s: float
    """Time of one all-reduce among the copies, in seconds."""

    @property
    def workers(self) -> int:
        """Number of workers in the component."""
        return self.rates.spans[-1]

    @property
    def cuts(self) -> list[int]:
        """All cuts of the model, from the empty one to the one with all layers."""
        return self.totals.cuts

    @property
    def last(self) -> int:
        """Index of the cut with all layers."""
        return len(self.cuts) - 1

    @property
    def covers(self) -> bool:
        """Whether depths matter: in training, where memory is limited or 2BW limits the minibatches in flight."""
        return self.model.training and (np.isfinite(self.capacity) or self.share is not None)

    @staticmethod
    def of(
        document: PlanDocument, model: CheckedModel, level: int, copies: int, threshold: float, among_s: float
    ) -> Transitions:
        """Prepare the stages of one space of plans. Raises an `InputError` where the model has too many cuts."""
        options = document.options
        if threshold <= 0:
            raise InputError("the certificate claims nothing: a threshold is 0")
        rates = UniformRates.of(document.cluster.inner(level))
        runs, aligned = _runs(rates, options.max_replicas)
        return Transitions(
            document=document,
            model=model,
            rates=rates,
            totals=Totals.of(model, MOST_CUTS),
            runs=runs,
            aligned=aligned,
            copies=copies,
            threshold=threshold,
            capacity=room_of(document.cluster, document.cluster.device) if options.memory else np.inf,
            overlap=options.overlap,
            speed=document.cluster.device.speed,
            recompute=options.recompute and model.training,
            parallel=options.boundary == "parallel",
            # Vertical sync keeps at least as many versions as minibatches in flight; only these are counted here.
            late=document.schedule == STASHING,
            share=(document.accumulate or 1) // copies if document.schedule == DOUBLE_BUFFERED else None,
            among_s=among_s,
        )

    def behind(self, cut: int, firsts: Ints) -> StageCandidates:
        """The stages that end at a cut and must be tried in front of states with these first workers.

        Two kinds of stages are left out, which docs/check.md shows to be sound: those in front of which no pipeline can
        exist, and those that end neither right before a first worker nor at the end of their component.
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
        backward = backward + executor_work_between(self.document, totals, cut, before)[:, None] / (
            replicas * self.speed
        )
        ring = np.zeros(forward.shape)
        if self.model.training:
            size = (totals.parameters[cut] - totals.parameters[before])[:, None]
            ring = figures.ring_allreduce_s(replicas, size, self.rates.allreduce[span], self.rates.latency_s[span])
        lost = self.hopeless(before[:, None], np.arange(self.workers), np.zeros(1))
        open_ = ~lost | (before == 0)[:, None]
        row, run = np.nonzero(self._quick(forward + backward, ring, replicas)[:, kind] & open_[:, start])
        at = row, kind[run]
        variants = [self._memory(cut, before[row], count[run], again=False)]
        if self.recompute:
            fixed, growing = self._memory(cut, before[row], count[run], again=True)
            quick = self._quick(2 * forward + backward, ring, replicas)[at]
            variants.append((np.where(quick, fixed, np.inf), growing))
        wait = figures.group_wait(ring, self.threshold, replicas, self.copies) if self.share is None else 0.0
        late = np.maximum(0.0, (ring + self.among_s) / self.threshold - 1.0 / self.copies)
        return StageCandidates(
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
        """Flags of the stages within the threshold. Under 2BW there are none if a copy has no minibatch an update."""
        if self.share == 0:
            return np.zeros(compute_s.shape, dtype=bool)
        time: Floats = figures.overlapped_s(compute_s, ring_s / (self.share or replicas), self.overlap)
        return time <= self.threshold

    def _memory(self, cut: int, before: Ints, replicas: Ints, *, again: bool) -> tuple[Floats, Floats]:
        """Memory of one worker: fixed bytes, and bytes for each minibatch in flight; `again` is with recomputation."""
        several = replicas * self.copies > 1
        return worker_memory(
            self.model,
            self.totals,
            cut,
            before,
            several,
            late=self.late,
            kept=2 * (self.share is not None),
            again=again,
        )

    def taken(
        self, stretch: StageCandidates, first: int, span: int, demand: float, next_replicas: float
    ) -> tuple[Ints, Floats]:
        """The stages that may stand in front of a state, as indices into the stretch, and the demand after each.

        The state is given by its first worker, the level of its first stage, its demand, and that stage's replicas.
        """
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
            depth = figures.in_flight_depth(demand, wait, transfer, self.threshold, replicas)
        fits: Flags = np.zeros(len(taken), dtype=bool)
        for fixed, growing in stretch.variants:
            fits |= fixed[taken] + depth * growing[taken] <= self.capacity
        if self.share is not None and self.covers:
            fits &= depth * replicas + stretch.late[taken] <= self.share
        leads = depth * replicas + wait if self.covers else np.zeros(len(taken))
        return taken[fits], leads[fits]

    def hopeless(self, before: Ints, room: Ints, demand: Floats) -> Flags:
        """Whether no pipeline can be completed in front of each state, by three bounds of docs/check.md.

        The states are given by their cut, their demand, and `room`, the number of workers in front that may be busy.
        """
        totals = self.totals
        work = totals.forward_s[before] + totals.backward_s[before]
        none: Flags = (room == 0) | (work > room * self.speed * self.threshold)
        if not self.parallel and self.workers > 1:
            nearest = next(level for level, span in enumerate(self.rates.spans) if span > 1)
            none |= totals.busier[before] > self.rates.message[nearest] * self.threshold
        if self.model.training and np.isfinite(self.capacity):
            corrects, buffered = self.model.corrects, self.share is not None
            each = totals.parameters[before] * (1 + corrects) * (not buffered)
            each = each + (0 if self.recompute else totals.saved[before])
            # A correction keeps one step for the two versions of 2BW, else one for each minibatch in flight but one.
            once = totals.parameters[before] * (1 + self.model.state_ratio - corrects + 2 * buffered * (1 + corrects))
            least = once + totals.buffers[before] + each * (1 + demand)
            none |= least * (1 - figures.ROUNDING) > room * self.capacity
        return none

    def words(self, stretch: StageCandidates, step: int) -> str:
        """A stage in words, for error messages."""
        members = self.cuts[stretch.cut] & ~self.cuts[int(stretch.before[step])]
        return stage_words(self.model, members, int(stretch.start[step]), int(stretch.end[step]) - 1)


def stage_words(model: CheckedModel, members: int, first: int, last: int) -> str:
    """A stage of some layers, a bit set, in words, for error messages."""
    names = [name for index, name in enumerate(model.names) if members >> index & 1]
    layers = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    return f"a stage of {layers} on worker {first}" + (f" to {last}" if last > first else "")


def worker_memory(
    model: CheckedModel,
    totals: Totals,
    cut: int,
    before: Ints,
    several: Flags,
    *,
    late: bool,
    kept: int,
    again: bool,
) -> tuple[Floats, Floats]:
    """Memory of one worker of stages from the cuts `before` to `cut`: fixed bytes, and bytes a minibatch in flight.

    `several` says which stages have replicas, `late` whether their updates then take one more version of the weights;
    `kept` is the number of versions where it does not depend on the minibatches in flight, otherwise 0, and `again`
    stands for recomputation.
    """
    weights = totals.weights(cut, before)
    buffers, saved = (total[cut] - total[before] for total in (totals.buffers, totals.saved))
    crossing = totals.sent + totals.returned
    fixed = buffers + crossing[cut] + crossing[before] + weights
    if not model.training:
        return fixed, np.zeros(len(before))
    delayed = several & ~((before == 0) & (cut == len(totals.cuts) - 1)) & late
    # Optimiser state, flat all-reduce buckets, and the weight versions that do not belong to a minibatch in flight.
    # A correction keeps a step of the optimiser for each version, but for one.
    each = 1 + model.corrects
    fixed = fixed + weights * (model.state_ratio + several + each * (kept or delayed) - model.corrects)
    fixed = fixed + totals.largest_workspace(cut, before)
    growing = totals.sent[before] + weights * each * (not kept)
    once = saved + totals.sent[cut]
    return (fixed + once, growing) if again else (fixed, growing + once)


def _runs(rates: UniformRates, most: int | None) -> tuple[NDArray[np.intp], Flags]:
    """`Transitions.runs` for stages of at most `most` workers, and `Transitions.aligned`.

    Workers may be moved inside the component of their own level. A single worker may also be moved inside the smallest
    component that holds the worker before it as well.
    """
    workers = rates.spans[-1]
    start, last = np.triu_indices(workers)
    kept = last - start < (most or workers)
    start, last = start[kept], last[kept]
    span = _level(rates, start, last)
    room = np.where(last > start, span, _level(rates, np.maximum(start - 1, 0), start))
    aligned: Flags = (last + 1) % np.array(rates.spans)[room] == 0
    # Worker 0 alone can always be moved.
    aligned &= last > 0
    return np.stack([start, last - start + 1, span], axis=1), aligned


def _level(rates: UniformRates, first: Ints, last: Ints) -> Ints:
    """The smallest level with a component that holds both workers, for arrays of workers."""
    level = np.zeros(first.shape, dtype=np.intp)
    for span in rates.spans[:-1]:
        level += first // span != last // span
    return level

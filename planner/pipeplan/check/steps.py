"""Every stage that is quick enough, by the cut that it ends at: what may stand in front of a state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.check import formulas
from pipeplan.check.document import Document
from pipeplan.check.model import Flags, Floats, Model
from pipeplan.check.rates import Rates
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
    wait: Floats
    """Minibatches that go by while the replicas wait for each other."""
    variants: tuple[tuple[Floats, Floats], ...]
    """Ways to hold what backward needs: bytes of one worker without and for each minibatch in flight; the first are
    infinite where the stage is not quick enough."""


@dataclass(frozen=True)
class Totals:
    """Sums over the layers of each cut, and what crosses it. A stage's own are differences of two."""

    forward_s: Floats
    backward_s: Floats
    parameters: Floats
    buffers: Floats
    saved: Floats
    sent: Floats
    returned: Floats


@dataclass(frozen=True)
class Steps:
    """Stages of pipelines in one component of a level, one of `copies` that run side by side."""

    model: Model
    rates: Rates
    cuts: list[int]
    """All of the model, the empty one first and everything last."""
    packed: NDArray[np.uint8]
    """The members of every cut, eight to a byte."""
    totals: Totals
    runs: NDArray[np.intp]
    """Start and length of every run of workers that a stage may take, one a row."""
    copies: int
    threshold: float
    """Seconds per minibatch of one copy."""
    capacity: float
    """Bytes of one worker; infinite where memory is not to limit."""
    overlap: float
    speed: float
    recompute: bool

    @property
    def workers(self) -> int:
        """Workers of one component."""
        return self.rates.spans[-1]

    @property
    def covers(self) -> bool:
        """Whether depths matter: only as far as they take memory, of which inference needs no more for them."""
        return self.model.training and np.isfinite(self.capacity)

    @staticmethod
    def of(document: Document, model: Model, level: int, copies: int, threshold: float) -> Steps:
        """All that the stages are made from; an `InputError` where the model has too many cuts to go through."""
        cuts, asked = model.cuts(MOST_CUTS), document.asked
        if threshold <= 0:
            raise InputError("the certificate claims nothing: a threshold is 0")
        rates = Rates.of(document.cluster.inner(level))
        inside = model.members(cuts)
        sent, returned = model.crossing(cuts)
        workers = rates.spans[-1]
        most = min(asked.max_replicas or workers, workers)
        runs = [(start, count) for start in range(workers) for count in range(1, min(most, workers - start) + 1)]
        weights = inside.astype(float)
        totals = Totals(
            forward_s=weights @ model.forward_s,
            backward_s=weights @ model.backward_s,
            parameters=weights @ model.parameters,
            buffers=weights @ model.buffers,
            saved=weights @ model.saved,
            sent=sent,
            returned=returned,
        )
        return Steps(
            model=model,
            rates=rates,
            cuts=cuts,
            packed=np.packbits(inside, axis=1),
            totals=totals,
            runs=np.array(runs, dtype=np.intp),
            copies=copies,
            threshold=threshold,
            capacity=document.cluster.device.memory_bytes if asked.memory else np.inf,
            overlap=asked.overlap,
            speed=document.cluster.device.speed,
            recompute=asked.recompute and model.training,
        )

    def behind(self, cut: int) -> Stretch:
        """The stages that end at a cut."""
        before = np.flatnonzero(~(self.packed & ~self.packed[cut]).any(axis=1))
        before = before[before != cut]
        start, replicas = self.runs.T
        span = np.array([self.rates.level(int(s), int(s + r - 1)) for s, r in self.runs], dtype=np.intp)
        totals = self.totals
        forward, backward, parameters, buffers, saved = (
            (total[cut] - total[before])[:, None]
            for total in (totals.forward_s, totals.backward_s, totals.parameters, totals.buffers, totals.saved)
        )
        allreduce = np.zeros((len(before), len(start)))
        if self.model.training:
            allreduce = formulas.ring(replicas, parameters, self.rates.allreduce[span], self.rates.latency_s[span])
        compute = (forward + backward) / (replicas * self.speed)
        quick = self._quick(compute, allreduce / replicas)
        row, run = np.nonzero(quick)
        chosen = before[row]
        many = replicas[run] * self.copies > 1
        whole = (chosen == 0) & (cut == len(self.cuts) - 1)
        weights = parameters[row, 0]
        crossing = totals.sent + totals.returned
        fixed = buffers[row, 0] + crossing[cut] + crossing[chosen]
        received, kept = totals.sent[chosen], saved[row, 0] + totals.sent[cut]
        if self.model.training:
            # One gradient, the optimiser's state, and a flat bucket and a late version of what is replicated.
            fixed = fixed + weights * (1 + self.model.state_ratio + many + (many & ~whole))
            variants = [(fixed, weights + received + kept)]
            if self.recompute:
                again = self._quick((2 * forward + backward) / (replicas * self.speed), allreduce / replicas)
                variants.append((np.where(again[row, run], fixed + kept, np.inf), weights + received))
        else:
            variants = [(fixed + weights, np.zeros(len(row)))]
        waits = formulas.wait(allreduce, self.threshold, replicas, self.copies)
        return Stretch(
            cut=cut,
            before=chosen,
            start=start[run],
            end=(start + replicas)[run],
            replicas=replicas[run],
            span=span[run],
            wait=np.broadcast_to(waits, allreduce.shape)[row, run],
            variants=tuple(variants),
        )

    def taken(self, stretch: Stretch, first: int, span: int, demand: float) -> tuple[Ints, Floats]:
        """The stages that may stand in front of a state, by index, and the demand that each leads to."""
        taken = np.flatnonzero(stretch.end <= first)
        last = stretch.cut == len(self.cuts) - 1
        transfer = np.zeros(len(taken))
        if not last:
            reach = np.array([self.rates.level(start, first) for start in range(first)], dtype=np.intp)
            level = np.maximum(reach[stretch.start[taken]], span)
            busier = max(self.totals.sent[stretch.cut], self.totals.returned[stretch.cut])
            passing = busier / self.rates.message[level]
            transfer = passing + self.rates.latency_s[level]
            near = passing <= self.threshold
            taken, transfer = taken[near], transfer[near]
        replicas, wait = stretch.replicas[taken], stretch.wait[taken]
        depth = np.ones(len(taken))
        if self.covers and not last:
            depth = formulas.depth(demand, wait, transfer, self.threshold, replicas)
        fits: Flags = np.zeros(len(taken), dtype=bool)
        for fixed, growing in stretch.variants:
            fits |= fixed[taken] + depth * growing[taken] <= self.capacity
        leads = depth * replicas + wait if self.covers else np.zeros(len(taken))
        return taken[fits], leads[fits]

    def words(self, stretch: Stretch, step: int) -> str:
        """A stage, for people."""
        first, last = int(stretch.start[step]), int(stretch.end[step]) - 1
        members = self.cuts[stretch.cut] & ~self.cuts[int(stretch.before[step])]
        names = [name for index, name in enumerate(self.model.names) if members >> index & 1]
        layers = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"a stage of {layers} on worker {first}" + (f" to {last}" if last > first else "")

    def _quick(self, compute: Floats, synchronisation: Floats) -> Flags:
        time: Floats = formulas.together(compute, synchronisation, self.overlap)
        return time <= self.threshold

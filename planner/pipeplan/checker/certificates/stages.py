"""The stages that stay within a threshold, including shared resources, and the states that they lead to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker import formulas
from pipeplan.checker.certificates.shared_loads import Pairs, SharedLevel, StageTraffic, ports_suffice
from pipeplan.checker.certificates.worker_runs import Rows, WorkerRuns
from pipeplan.checker.data_parallel import ddp_step_time, waits_for_update
from pipeplan.checker.document import DOUBLE_BUFFERED, STASHING, CheckedStage, PlanDocument
from pipeplan.checker.figures import stage_figures
from pipeplan.checker.model import CheckedModel, Flags, Floats, Totals
from pipeplan.checker.network import LinkRates, NetworkRates
from pipeplan.cluster_data.cluster import Cluster

Ints = NDArray[np.intp]

_STATES_AT_ONCE = 256
_AT_ONCE = 400_000
"""Largest number of pairs of a state and a stage that are processed at once."""


@dataclass(frozen=True)
class StagesAtCut(Rows):
    """The stages I→J for one cut J that stay within the threshold in every place, in the order of their runs.

    Arrays have one entry for each stage, with and without recomputation.
    """

    cut: int
    before: Ints
    """Index of the cut I."""
    again: Flags
    """Whether the stage recomputes its forward pass."""
    fixed: Floats
    """Bytes of one worker that do not depend on the depth."""
    growing: Floats
    """Bytes of one worker for each minibatch in flight."""
    wait: Floats
    """Minibatches that pass while the replicas wait for each other."""
    late: Floats
    """Under 2BW, minibatches that pass between the last backward pass of a group and its update."""
    forward_s: Floats
    """Time of a minibatch's forward pass on a worker of speed 1, plus half of the executor's own work."""
    work_s: Floats
    """Time of all passes of a minibatch on a worker of speed 1."""
    step_s: Floats
    """The part of `work_s` that is the optimiser's step."""
    ring_s: Floats
    """Time of one all-reduce among the replicas of a copy."""
    traffic: StageTraffic


@dataclass(frozen=True)
class CertificateStates(Rows):
    """States of one space of plans, one array entry for each."""

    cut: Ints
    """The cut, as an index into the cuts of the model."""
    first: Ints
    """First worker of the stage behind the cut."""
    replicas: Ints
    """Replicas of that stage."""
    demand: Floats
    """Minibatches that a stage in front must cover; 0 if depths do not matter."""
    loads: Floats
    """A row for each state: busy times of the cards and cores of the components of its first worker, in seconds per
    minibatch, without the traffic of the cut itself. 0 if the worker is the first of its component."""
    times: Floats
    """A row for each state: the parts of a batch's time behind the cut, with a flush; otherwise no columns."""
    stages: Ints
    """Number of stages behind the cut; 0 if stages are not counted."""
    busy: Ints
    """Number of workers of these stages; 0 if workers are not counted."""


@dataclass(frozen=True)
class LeadingStages(Rows):
    """Stages in front of states, with one array entry for each pair, and the figures of the resulting states."""

    state: Ints
    """Index of the state among those of its cut."""
    stage: Ints
    """Index of the stage among those at the cut."""
    demand: Floats
    loads: Floats
    times: Floats


@dataclass(frozen=True)
class StageSpace:
    """All stages of the pipelines of one space of plans, with `copies` pipelines side by side."""

    document: PlanDocument
    model: CheckedModel
    totals: Totals
    cluster: Cluster
    """The component that one pipeline lies in."""
    runs: WorkerRuns
    levels: tuple[SharedLevel, ...]
    copies: int
    workers: range
    """The workers of the components that hold the copies."""
    threshold: float
    """Longest time of any resource of one copy, in seconds per minibatch of the copy."""
    limit_s: float
    """Longest time of any shared resource, in seconds per minibatch of all copies."""
    among_s: float
    """Time of one all-reduce among the copies, in seconds."""

    @property
    def most_stages(self) -> int | None:
        """Largest number of stages; None if the states do not count stages."""
        return self.document.options.stages or self.document.options.max_stages

    @property
    def same_stages(self) -> bool:
        """Whether the number of stages must be exactly `most_stages`."""
        return self.document.options.stages is not None

    @property
    def most_busy(self) -> int | None:
        """Largest number of busy workers of one copy; None if the states do not count workers."""
        most = self.document.options.max_workers
        return None if most is None else min(most // self.copies, self.runs.workers)

    @cached_property
    def columns(self) -> list[tuple[SharedLevel, slice]]:
        """The levels, each with its columns among the loads of a state."""
        ends = list(itertools.accumulate((level.width for level in self.levels), initial=0))
        return [(level, slice(*part)) for level, part in zip(self.levels, itertools.pairwise(ends), strict=True)]

    @property
    def last(self) -> int:
        """Index of the cut with all layers."""
        return len(self.totals.cuts) - 1

    @property
    def share(self) -> int | None:
        """Under 2BW, minibatches of one update in one copy; otherwise None."""
        return self.document.share(self.copies) if self.document.schedule == DOUBLE_BUFFERED else None

    @property
    def covers(self) -> bool:
        """Whether depths matter: in training, if memory is limited or 2BW limits the minibatches in flight."""
        return self.model.training and (self.document.options.memory or self.share is not None)

    def traffic_of(self, cut: Ints | int) -> tuple[Floats, Floats]:
        """Bytes across cuts in one copy, (forward, backward), for a minibatch of all copies."""
        return self.totals.sent[cut] / self.copies, self.totals.returned[cut] / self.copies

    @property
    def parts(self) -> int:
        """The number of parts of a batch's time in every state."""
        return 0

    def hopeless(self, before: Ints, first: Ints, room: Ints, times: Floats | None = None) -> Flags:
        """Whether the layers in the cuts `before` are too much work for the workers in front.

        These are the workers before `first`; at most `room` of them may be busy. `times`: the parts of a batch's time
        behind the cuts, if known.
        """
        work = self.totals.forward_s[before] + self.totals.backward_s[before]
        fastest = max(device.speed for device in self.cluster.devices)
        speed = np.minimum(self.runs.speed_before[first], np.maximum(room, 0) * fastest)
        return np.asarray((first == 0) | (work > speed * self.threshold))

    # -- the stages of one cut --

    def stages(self, cut: int) -> StagesAtCut:
        """The stages that end at a cut and stay within the threshold by the conditions that do not depend on later
        stages.
        """
        totals, runs, options = self.totals, self.runs, self.document.options
        before = totals.inside(cut)
        kinds, kind = np.unique(
            np.stack([runs.replicas, runs.speed, runs.ring, runs.ring_latency_s]), axis=1, return_inverse=True
        )
        replicas, speed, ring_rate, ring_latency = kinds
        ring = np.zeros((len(before), kinds.shape[1]))
        if self.model.training:
            size = totals.weights(cut, before)[:, None]
            ring = np.asarray(formulas.ring_allreduce_s(replicas, size, ring_rate, ring_latency))
        forward, backward = ((total[cut] - total[before])[:, None] for total in (totals.forward_s, totals.backward_s))
        own = formulas.executor_work_s(self.document, totals, cut, before)[:, None]
        backward = backward + own
        everywhere = np.full(len(runs.start), runs.workers)
        lost = self.hopeless(before[:, None], runs.start, everywhere) & (before > 0)[:, None]
        found = []
        for again in (False, True) if options.recompute and self.model.training else (False,):
            quick = self._quick(before, (forward, backward + forward * again), ring, (replicas, speed))
            quick = quick[:, kind.reshape(-1)] & ~lost
            found.append(np.stack([*np.nonzero(quick), np.full(int(quick.sum()), again)]))
        row, run, again_at = np.concatenate(found, axis=1)
        order = np.argsort(run, kind="stable")
        row, run, recomputes = row[order], run[order], again_at[order] > 0
        work = (forward + backward)[row, 0] + forward[row, 0] * recomputes
        ring_s = ring[row, kind.reshape(-1)[run]]
        stages = self._sized(cut, before[row], run, ((forward + own / 2)[row, 0], work), ring_s, recomputes)
        return stages.take(self._possible(stages))

    def _quick(
        self, before: Ints, passes: tuple[Floats, Floats], ring_s: Floats, kinds: tuple[Floats, Floats]
    ) -> Flags:
        """Flags of the stages within the threshold: a row for each of the cuts `before`, and columns for replicas and
        speed.

        Under 2BW no stage is within the threshold if a copy has no minibatch in an update.
        """
        if self.share == 0:
            return np.zeros(ring_s.shape, dtype=bool)
        (forward, backward), (replicas, speed) = passes, kinds
        compute_s = (forward + backward) / (replicas * speed)
        time = formulas.overlapped_s(compute_s, ring_s / (self.share or replicas), self.document.options.overlap)
        return np.asarray(time <= self.threshold)

    def _sized(
        self, cut: int, before: Ints, run: Ints, passes: tuple[Floats, Floats], ring: Floats, again: Flags
    ) -> StagesAtCut:
        """Stages on their runs.

        `passes`: (forward pass with half of the executor's work, all passes), on a worker of speed 1. `ring`: the time
        of one all-reduce.
        """
        forward, work = passes
        document, replicas, everyone = self.document, self.runs.replicas[run], self.runs.replicas[run] * self.copies
        once, more = (self._memory(cut, before, everyone, again=kind) for kind in (False, True))
        fixed, growing = (np.where(again, *both) for both in zip(more, once, strict=True))
        wait = 0.0
        if not document.flushes and self.share is None:
            wait = formulas.group_wait(ring, self.threshold, replicas, self.copies)
        size, common = self.totals.weights(cut, before), document.minibatches if document.accumulates else None
        group = self.group_s(run, size)
        # With a flush, the part of an all-reduce that no pass hides counts in the batch.
        size = size * (self.model.training and not document.flushes)
        sent, returned = self.traffic_of(cut)
        received, back = self.traffic_of(before)
        traffic = StageTraffic(
            run=run,
            hop=formulas.hop_bytes(document, replicas, size) / (common or everyone),
            copied=formulas.hop_bytes(document, self.copies, size / replicas) / (common or self.copies),
            sent=np.stack([sent / replicas, returned / replicas], axis=1),
            ahead=np.stack([back / replicas, received / replicas], axis=1),
            core_s=formulas.core_busy_s(document, work / self.runs.speed[run], group, everyone),
        )
        return StagesAtCut(
            cut=cut,
            before=before,
            again=again,
            fixed=fixed,
            growing=growing,
            wait=np.broadcast_to(wait, ring.shape),
            late=np.maximum(0.0, (ring + self.among_s) / self.threshold - 1.0 / self.copies),
            forward_s=forward,
            work_s=work,
            step_s=self.totals.update_s[cut] - self.totals.update_s[before],
            ring_s=ring,
            traffic=traffic,
        )

    def _memory(self, cut: int, before: Ints, replicas: Ints, *, again: bool) -> tuple[Floats, Floats]:
        """Fixed bytes of a worker of stages, and bytes for each minibatch in flight (`formulas.stage_memory`)."""
        # Vertical sync may keep several weight versions that belong to no minibatch in flight; only one is counted
        # here. Updates are late if a stage has replicas and there are several stages.
        kept = 1 if self.document.flushes else 2 if self.share is not None else 0
        late = (replicas > 1) & ~((before == 0) & (cut == self.last)) & (self.document.schedule == STASHING)
        fixed, growing = formulas.stage_memory(
            self.document,
            self.model,
            self.totals,
            cut,
            before,
            replicas=replicas,
            kept=kept or late,
            each=not kept,
            again=again,
        )
        return fixed + self.totals.largest_workspace(cut, before), growing

    def group_s(self, run: Ints, size: Floats) -> Floats:
        """The time of one all-reduce among the replicas of all copies."""
        bandwidth, latency = self.runs.ring[run], self.runs.ring_latency_s[run]
        if self.copies > 1:
            link: LinkRates = NetworkRates.of(self.document.cluster).among(self.workers)
            bandwidth, latency = np.full(len(run), link.allreduce), np.full(len(run), link.latency_s)
        everyone = self.runs.replicas[run] * self.copies
        return np.asarray(formulas.ring_allreduce_s(everyone, size, bandwidth, latency) * self.model.training)

    def _possible(self, stages: StagesAtCut) -> Flags:
        """Whether ports, components that only one stage uses, and the wait of a single stage stay within the limit."""
        if not self.document.options.contention:
            return np.ones(len(stages.before), dtype=bool)
        possible = ports_suffice(self.cluster, self.runs, stages.traffic, self.limit_s)
        for level in self.levels:
            possible &= level.possible(stages.traffic)
        if stages.cut == self.last and waits_for_update(self.document):
            known: dict[tuple[float, ...], float] = {}
            for row in np.flatnonzero(possible & (stages.before == 0)).tolist():
                possible[row] = self._awaited_s(stages, row, known) <= self.limit_s
        return possible

    def _awaited_s(self, stages: StagesAtCut, row: int, known: dict[tuple[float, ...], float]) -> float:
        """The step time of a plan of one stage, whose forward pass waits for the update. `known`: cache of earlier
        results.
        """
        run, runs, size, again = int(stages.traffic.run[row]), self.runs, self.cluster.workers, bool(stages.again[row])
        key = tuple(float(array[run]) for array in (runs.replicas, runs.speed, runs.ring, runs.ring_latency_s))
        if (*key, again) not in known:
            mine = range(int(runs.start[run]), int(runs.end[run]))
            workers = tuple(self.workers[copy * size + worker] for worker in mine for copy in range(self.copies))
            stage = CheckedStage(self.model.names, workers, 1, 1, again)
            alone = replace(self.document, stages=(stage,), copies=self.copies)
            (figure,) = stage_figures(alone, self.model)
            known[*key, again] = ddp_step_time(alone, self.model, figure.pass_s, figure.group_s)
        return known[*key, again]

    # -- stages in front of states --

    def leads(self, stages: StagesAtCut, states: CertificateStates) -> Iterator[LeadingStages]:
        """The stages that can be put in front of some states, a part at a time."""
        for begin in range(0, len(states.first), _STATES_AT_ONCE):
            some = np.arange(begin, min(begin + _STATES_AT_ONCE, len(states.first)))
            for leads in self._leads(stages, states.take(some)):
                yield replace(leads, state=some[leads.state])

    def _leads(self, stages: StagesAtCut, states: CertificateStates) -> Iterator[LeadingStages]:
        """The stages in front of a limited number of states."""
        pairs = self._pairs(stages, states)
        starts, stops = (np.searchsorted(stages.traffic.run, pairs.run, side=side) for side in ("left", "right"))
        counts = stops - starts
        edges = np.searchsorted(np.cumsum(counts), np.arange(0, counts.sum() + 1, _AT_ONCE), side="left")
        for begin, end in zip(edges, [*edges[1:], len(counts)], strict=True):
            mine = slice(int(begin), int(end))
            pair = np.repeat(np.arange(mine.start, mine.stop), counts[mine])
            within = np.arange(len(pair)) - np.repeat(np.cumsum(counts[mine]) - counts[mine], counts[mine])
            yield self._in_front(stages, states, pairs.take(pair), starts[pair] + within)

    def _pairs(self, stages: StagesAtCut, states: CertificateStates) -> Pairs:
        """All pairs of a state and a run in front of it whose boundary stays within the threshold."""
        runs, used = self.runs, np.unique(stages.traffic.run)
        end, first = runs.end[used], states.first[:, None]
        state, which = np.nonzero((end == first) | (runs.anywhere[used] & (end < first)))
        count, run = len(state), used[which]
        links = np.full(count, np.inf), np.zeros(count), np.ones(count, dtype=np.intp)
        pairs = Pairs(state, states.first[state], states.replicas[state], run, *links, states.loads[state])
        traffic = None
        if stages.cut != self.last:
            traffic = self.traffic_of(stages.cut)
            bandwidth, latency_s = runs.hop(run, pairs.first, pairs.first + pairs.replicas - 1)
            pairs = replace(pairs, bandwidth=bandwidth, latency_s=latency_s)
            if self.document.options.boundary == "parallel":
                pairs = replace(pairs, lanes=np.minimum(runs.replicas[run], pairs.replicas))
            pairs = pairs.take(self._near(stages.cut, pairs))
        closed, loads = np.ones(len(pairs.run), dtype=bool), np.empty(pairs.loads.shape)
        for level, part in self.columns:
            within, loads[:, part] = level.joined(pairs, pairs.loads[:, part], traffic)
            closed &= within
        return replace(pairs, loads=loads).take(closed)

    def _near(self, cut: int, pairs: Pairs) -> Flags:
        """Whether boundaries stay within the threshold."""
        return np.asarray(self.totals.busier[cut] / pairs.bandwidth / pairs.lanes <= self.threshold)

    def _depth(self, stages: StagesAtCut, demand: Floats, transfer_s: Floats) -> Floats:
        """For each pair: the fewest minibatches in flight of a stage in front of stages with this demand."""
        replicas = self.runs.replicas[stages.traffic.run]
        if not self.covers or stages.cut == self.last:
            return np.ones(len(demand))
        return np.asarray(formulas.in_flight_depth(demand, stages.wait, transfer_s, self.threshold, replicas))

    def _times(self, stages: StagesAtCut, before: Floats, pairs: Pairs) -> Floats:
        """The parts of a batch's time once stages are put in front of states with the parts `before`."""
        return before

    def _in_time(self, stages: StagesAtCut, times: Floats) -> Flags:
        """Whether the parts of a batch's time leave enough for the layers in front of stages."""
        return np.ones(len(times), dtype=bool)

    def _in_front(self, stages: StagesAtCut, states: CertificateStates, pairs: Pairs, chosen: Ints) -> LeadingStages:
        """The chosen stages, one for each pair, if they fit in front of the pair's state."""
        mine = stages.take(chosen)
        replicas, capacity = self.runs.replicas[mine.traffic.run], self.runs.memory[mine.traffic.run]
        transfer = self.totals.busier[stages.cut] / pairs.bandwidth + pairs.latency_s
        depth = self._depth(mine, states.demand[pairs.state], transfer)
        fits = np.ones(len(chosen), dtype=bool)
        if self.document.options.memory:
            fits = mine.fixed + depth * mine.growing <= capacity
        if self.share is not None and self.covers:
            fits &= depth * replicas + mine.late <= self.share
        found = np.zeros(pairs.loads.shape)
        for level, part in self.columns:
            within, found[:, part] = level.extended(mine.traffic, pairs.loads[:, part])
            fits &= within
        demand = depth * replicas + mine.wait if self.covers else np.zeros(len(chosen))
        times = self._times(mine, states.times[pairs.state], pairs)
        return LeadingStages(pairs.state, chosen, demand, found, times).take(fits & self._in_time(mine, times))

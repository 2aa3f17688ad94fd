"""What the dynamic program looks up: stage times, boundary times and memory for pairs of cuts and placements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan import cost
from pipeplan.cuts import Cuts, Floats
from pipeplan.links import Links
from pipeplan.problem import Problem

Ints = NDArray[np.intp]


@dataclass(frozen=True)
class Placements:
    """Runs of consecutive workers, P of them, sorted by start and span so that equal keys are adjacent."""

    start: Ints
    end: Ints
    """One past the last worker."""
    replicas: Ints
    span: Ints
    """Smallest level that holds the run (0 for a single worker)."""
    kind: Ints
    """Index into the distinct (replicas, span) pairs, on which a stage's time depends."""
    kinds: NDArray[np.intp]
    """Those pairs, one a row."""
    group: Ints
    """Where each run of equal (start, span) begins."""

    @staticmethod
    def of(problem: Problem) -> Placements:
        """All runs that the cluster and the cap on replicas allow."""
        cluster, workers = problem.cluster, problem.cluster.workers
        most = min(problem.options.max_replicas or workers, workers)
        rows = [
            (first, cluster.level_between(first, first + count - 1), count)
            for first in range(workers)
            for count in range(1, min(most, workers - first) + 1)
        ]
        table = np.array(sorted(rows), dtype=np.intp)
        start, span, replicas = table.T
        kinds, kind = np.unique(np.stack([replicas, span], axis=1), axis=0, return_inverse=True)
        changed = np.flatnonzero(np.diff(start * (len(cluster.levels) + 1) + span)) + 1
        group = np.concatenate([[0], changed]).astype(np.intp)
        return Placements(start, start + replicas, replicas, span, kind.reshape(-1), kinds, group)


@dataclass(frozen=True)
class Tables:
    """Everything that does not depend on the threshold."""

    cuts: Cuts
    placements: Placements
    smaller: tuple[Ints, ...]
    """For every cut J: the cuts I ⊂ J from which a stage may lead to it."""
    stage_s: tuple[Floats, ...]
    """For every J: time of the stage I→J, by I and kind of placement."""
    allreduce_s: tuple[Floats, ...]
    """For every J: time of one all-reduce of the stage I→J, by I and kind of placement."""
    fixed: tuple[Floats, ...]
    """For every J: memory of the stage I→J that does not depend on the depth, by I."""
    growing: tuple[Floats, ...]
    """For every J: memory of the stage I→J for each minibatch in flight, by I (zero for inference)."""
    replicated: tuple[Floats, ...]
    """For every J: memory that replication adds to the stage I→J, by I and kind of placement."""
    boundary_s: Floats
    """Time on the link of the busier direction, by cut and level."""
    transfer_s: Floats
    """One-way transfer time, by cut and level."""
    reach: Ints
    """Level of the component that holds worker p and worker q, by p and q ≥ p."""

    @staticmethod
    def of(problem: Problem, cuts: Cuts) -> Tables:
        """Tabulate a problem; the memory needed is that of all nested pairs of cuts times distinct placements."""
        placements, links = Placements.of(problem), Links.of(problem.cluster)
        replicas, span = placements.kinds.T
        smaller = tuple(cuts.smaller(index) for index in range(len(cuts.ideals)))
        busier = np.maximum(cuts.sent, cuts.returned)[:, None]
        both_ways = cuts.sent + cuts.returned
        last = len(cuts.ideals) - 1
        stage_s, allreduce_s, fixed, growing, replicated = [], [], [], [], []
        for index, before in enumerate(smaller):
            work = (cuts.work_s[index] - cuts.work_s[before])[:, None]
            parameters = cuts.parameters[index] - cuts.parameters[before]
            compute = cost.compute_time(work, replicas, problem.cluster.device.speed)
            synchronisation = np.zeros_like(compute)
            if problem.training:
                bandwidth, latency = links.allreduce_bandwidth[span], links.allreduce_latency[span]
                synchronisation = cost.synchronisation_time(replicas, parameters[:, None], bandwidth, latency)
            allreduce_s.append(synchronisation * replicas)
            stage_s.append(cost.overlapped(compute, synchronisation, problem.options.overlap))
            buffers = cuts.buffers[index] - cuts.buffers[before]
            ratio, around = problem.profile.optimizer_state_ratio, both_ways[index] + both_ways[before]
            fixed.append(cost.fixed_memory(parameters, buffers, around, ratio, problem.training))
            saved = cuts.saved[index] - cuts.saved[before]
            training = float(problem.training)
            growing.append(training * cost.memory_per_depth(parameters, saved, cuts.sent[before], cuts.sent[index]))
            single = np.logical_and(before == 0, index == last)[:, None]
            lag = cost.update_lag(replicas * problem.copies, single)
            replicated.append(training * cost.replica_memory(parameters[:, None], replicas * problem.copies, lag))
        return Tables(
            cuts=cuts,
            placements=placements,
            smaller=smaller,
            stage_s=tuple(stage_s),
            allreduce_s=tuple(allreduce_s),
            fixed=tuple(fixed),
            growing=tuple(growing),
            replicated=tuple(replicated),
            boundary_s=cost.boundary_time(busier, links.sendrecv_bandwidth),
            transfer_s=cost.transfer_time(busier, links.sendrecv_bandwidth, links.sendrecv_latency),
            reach=_reach(problem),
        )


def _reach(problem: Problem) -> Ints:
    workers = problem.cluster.workers
    table = np.zeros((workers, workers), dtype=np.intp)
    for first in range(workers):
        for last in range(first, workers):
            table[first, last] = problem.cluster.level_between(first, last)
    return table

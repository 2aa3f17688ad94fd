"""The time of a batch under a flush schedule, as the searches over cuts build it up from the output end.

The time from one update to the next (docs/cost-model.md, "Flush schedules") is the longest of several paths. A state of
a search has two numbers (`SearchStates.times`):

    V1   the longest path from the state's first stage to another stage, including that stage's work
    V2   a lower bound on the batch: the longest path that begins with an all-reduce, or V1 with the shortest path from
         the input to the state's first stage

A further stage in front adds its pass and its transfers to V1, or replaces V1 by its own work. Neither number ever
falls, so a state is dropped once V2 exceeds the limit. At the empty cut, V2 is the time of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan.schedules import GPIPE, TRAITS
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.stage_terms import StageTerms

Counts = Floats | Ints | int
"""Numbers of replicas, as an array or one number."""


@dataclass(frozen=True)
class Placed:
    """Stages on their workers, and the links to the stages behind them, as arrays with an entry for each stage."""

    stage: StageTerms
    replicas: Floats | Ints
    speed: Floats | float
    allreduce_s: Floats
    """Seconds of one all-reduce among the replicas of one copy."""
    bandwidth: Floats | float = math.inf
    """Bandwidth of messages to the stage behind, in bytes/s; infinite for the last stage."""
    latency_s: Floats | float = 0.0
    links: Ints | int = 1
    """Number of messages to the stage behind that are sent at the same time."""


@dataclass(frozen=True)
class BatchLimit:
    """The longest batch that a search looks for, on one component of the cluster."""

    terms: CostTerms
    limit_s: float
    """Seconds from one update to the next."""

    @cached_property
    def minibatches(self) -> int:
        """Minibatches of one update, in the copy that has the most."""
        problem = self.terms.problem
        assert problem.options.accumulate is not None
        return int(formulas.rounds(problem.options.accumulate, problem.copies))

    @property
    def holds_all(self) -> bool:
        """Whether a replica holds all its minibatches in flight, whatever the stages behind it, as under GPipe."""
        return self.terms.schedule == GPIPE

    @property
    def budget_s(self) -> float:
        """The limit with a tolerance for rounding."""
        return self.limit_s * (1 + SLACK)

    @cached_property
    def work_s(self) -> Floats:
        """For each cut, all passes of one minibatch through the layers inside it, on the fastest device."""
        return np.asarray(self.terms.cuts.work_s / self.terms.fastest)

    @cached_property
    def ahead_s(self) -> Floats:
        """For each cut, a lower bound on the time that the layers inside it add to V1."""
        cuts = self.terms.cuts
        passes = cuts.forward_s if TRAITS[self.terms.schedule].splits else cuts.work_s - cuts.update_s
        return np.asarray(passes / self.terms.fastest)

    @cached_property
    def floor_s(self) -> float:
        """A lower bound on the batch time of all pipelines."""
        return max(self.minibatches * float(self.work_s[-1]) / self.terms.workers, float(self.ahead_s[-1]))

    @cached_property
    def most_s(self) -> float:
        """A time that excludes no batch: passes, transfers and exchanges of all stages one after another."""
        terms = self.terms
        exchange = 0.0 if terms.shared is None else terms.workers * float(sum(terms.shared.exchange_s))
        among = terms.problem.copies_allreduce_s * (1 + self.minibatches)
        return among + exchange + terms.most * (self.minibatches + 2 * terms.workers)

    @cached_property
    def workers_in_front(self) -> Ints:
        """For each cut, the fewest workers that the layers inside it need; 0 for the empty cut.

        A stage on r workers takes at least M / r passes, so r ≥ M · pass / limit, and this adds up over stages. Passes
        here include the optimiser's step, a share of which is counted for every minibatch.
        """
        need = np.ceil(self.minibatches * self.work_s / self.budget_s - 1e-9)
        return np.where(np.arange(len(need)) > 0, np.maximum(need, 1), 0).astype(np.intp)

    def least_replicas(self, stage: StageTerms) -> Floats:
        """The fewest replicas with which stages finish within the limit, after the path from the input to them."""
        passes, tail = stage.passes_s / self.terms.fastest, stage.tail_s / self.terms.fastest
        spare = self.budget_s - np.maximum(self.ahead_s[stage.begin] - tail, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            rounds = np.floor(np.where(passes > 0, spare / passes, np.inf) * (1 + 1e-12))
            return np.where(rounds < 1, np.inf, np.ceil(self.minibatches / np.maximum(rounds, 1) - 1e-12))

    def crossing_s(self, cut: int | Ints, bandwidth: Floats | float, links: Ints | int) -> Floats:
        """Seconds for which all minibatches keep one link of a boundary busy; 0 if cards are charged instead."""
        if self.terms.problem.options.contention:
            return np.zeros(np.broadcast(cut, bandwidth).shape)
        busier = np.maximum(self.terms.cuts.sent[cut], self.terms.cuts.returned[cut])
        return np.asarray(formulas.flush_busy(busier / bandwidth, self.minibatches, links))

    def in_front(self, before: Floats, placed: Placed) -> Floats:
        """The times of states (rows) after stages have been added in front."""
        stage, speed, splits = placed.stage, placed.speed, placed.stage.splits
        targets, ends = stage.begin, stage.ends
        ways = (self.terms.cuts.sent[ends] + self.terms.cuts.returned[ends]) / placed.bandwidth + 2 * placed.latency_s
        ahead = stage.ahead_s / speed
        own = formulas.flush_busy(stage.passes_s / speed, self.minibatches, placed.replicas)
        path = np.maximum(own - stage.tail_s / speed, ahead + before[:, 0] + ways / (1 + splits))
        if not self.terms.problem.options.contention:
            crossing = self.crossing_s(ends, placed.bandwidth, placed.links)
            # The last stage has no boundary behind it.
            path = np.maximum(path, np.where(crossing > 0, ahead + crossing, 0.0))
            own = np.maximum(own, np.where(crossing > 0, ahead + crossing, 0.0))
        # While stages in front drain, deferred gradients of weights may fill the time of an all-reduce.
        delayed = np.maximum(own, np.where(targets == 0, path, 0.0) if splits else path)
        delayed = delayed + stage.waited_s(placed.allreduce_s, speed)
        bound = np.maximum.reduce([before[:, 1], delayed, path + self.ahead_s[targets]])
        return np.stack([path, bound], axis=1)

    def reaches(self, targets: Ints, times: Floats, workers: Ints) -> Flags:
        """Whether states may become a batch within the limit, with `workers` workers for the layers in front."""
        least = self.minibatches * self.work_s[targets] / np.maximum(workers, 1)
        return np.asarray((times[:, 1] <= self.budget_s) & (least <= self.budget_s))

    # -- depths --

    def depth(self, behind: Floats, replicas: Counts) -> Floats:
        """The minibatches in flight at stages, given the minibatches `behind` them."""
        if self.holds_all:
            return np.asarray(formulas.rounds(self.minibatches, replicas), dtype=np.float64)
        return np.asarray(formulas.flush_depth(behind, self.minibatches, replicas), dtype=np.float64)

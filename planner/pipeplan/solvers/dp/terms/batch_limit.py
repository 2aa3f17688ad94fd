"""The time of a batch under a flush schedule, as the searches over cuts add it up, stage by stage.

The time from one update to the next (docs/cost-model.md, "Flush schedules") is a sum V over the stages of a pipeline,
plus bounds, each of which is a maximum over stages and boundaries, plus the all-reduce among copies:

    V         passes of the first minibatch, its transfers both ways, the exchange of the gradients of shared weights
    bounds    1f1b-flush: steady, exposed          gpipe: forward, backward, exposed

A state of a search has V and the bounds of the stages behind its cut (`SearchStates.times`). Both only grow as further
stages are put in front, and so does what the layers in front need at least. A state is kept only if all of this
together is within the limit, so the first state that reaches the empty cut belongs to a batch within the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan.schedules import TRAITS
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK
from pipeplan.solvers.dp.terms.cost_terms import CostTerms
from pipeplan.solvers.dp.terms.stage_terms import StageTerms

Counts = Floats | Ints | int
"""Numbers of replicas."""


@dataclass(frozen=True)
class Placed:
    """Stages on their workers, and what joins them with the stages behind, an array entry for each."""

    stage: StageTerms
    row: Ints
    """The row of every stage in `stage`."""
    replicas: Floats | Ints
    speed: Floats | float
    allreduce_s: Floats
    """Seconds of one all-reduce among the replicas of one copy."""
    bandwidth: Floats | float = math.inf
    """Bytes/s of messages to the stage behind; infinite for the last stage."""
    latency_s: Floats | float = 0.0
    links: Ints | int = 1
    """Messages to the stage behind that are sent at the same time."""


@dataclass(frozen=True)
class BatchLimit:
    """The longest batch that a search looks for, on one component of the cluster."""

    terms: CostTerms
    limit_s: float
    """Seconds from one update to the next."""
    steady_from_s: float = 0.0
    """A shorter steady part counts as this one (`steady_bands`)."""
    steady_to_s: float = math.inf
    """The longest steady part of the batches that are looked for. Only schedules with one phase limit it."""

    @cached_property
    def minibatches(self) -> int:
        """Minibatches of one update, in the copy that has most."""
        problem = self.terms.problem
        assert problem.options.accumulate is not None
        return int(formulas.rounds(problem.options.accumulate, problem.copies))

    @property
    def phases(self) -> int:
        """The number of bounds on the steady part, one for each phase: GPipe has two."""
        return TRAITS[self.terms.schedule].phases

    @property
    def width(self) -> int:
        """The number of columns of `SearchStates.times`."""
        return 2 + self.phases

    @property
    def budget_s(self) -> float:
        """Seconds for V and the bounds, with slack for rounding."""
        return self.limit_s * (1 + SLACK) - self.terms.problem.copies_allreduce_s

    @cached_property
    def passes_s(self) -> tuple[Floats, ...]:
        """For each phase and cut, the passes of one minibatch through the layers inside the cut, on the fastest
        device."""
        cuts, fastest = self.terms.cuts, self.terms.fastest
        both = cuts.work_s / fastest
        return (both,) if self.phases == 1 else (cuts.forward_s / fastest, both - cuts.forward_s / fastest)

    @cached_property
    def work_s(self) -> Floats:
        """For each cut, all passes of one minibatch through the layers inside it, on the fastest device."""
        return np.asarray(np.sum(self.passes_s, axis=0))

    @cached_property
    def most_steady_s(self) -> float:
        """The longest steady part that leaves time for the first minibatch's passes."""
        return min(max(0.0, self.budget_s - float(self.work_s[-1])), self.steady_to_s)

    @cached_property
    def least_steady_s(self) -> float:
        """A lower bound on the steady part of every pipeline, and so on the pace inside its batch."""
        everywhere = self._steady_in_front(np.array([len(self.work_s) - 1]), np.array([self.terms.workers]))
        return max(float(np.sum(everywhere)), self.steady_from_s)

    @cached_property
    def floor_s(self) -> float:
        """A lower bound on the batches of all pipelines."""
        return float(self.work_s[-1]) + self.least_steady_s + self.terms.problem.copies_allreduce_s

    @cached_property
    def most_s(self) -> float:
        """A time that excludes no batch."""
        return self.terms.problem.copies_allreduce_s * (1 + self.minibatches) + self.terms.most * self.minibatches

    @cached_property
    def workers_in_front(self) -> Ints:
        """For each cut, the fewest workers that the layers inside it need; 0 for the empty cut."""
        everywhere = np.arange(len(self.work_s))
        return self.least_workers(everywhere, np.array([self.phases * self.most_steady_s]))[:, 0].astype(np.intp)

    def least_workers(self, targets: Ints, spare_s: Floats) -> Floats:
        """The fewest workers for the layers inside cuts (rows) within steady parts of all phases (columns).

        A stage on r workers keeps within a steady part S if r ≥ M · pass / (S + pass), and parts of some layers need
        together no fewer than all of them as one stage.
        """
        work = self.work_s[targets][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.where(work > 0, self.minibatches * work / (np.maximum(spare_s, 0.0) + work), 0.0)
        return np.where(targets[:, None] > 0, np.maximum(np.ceil(need - 1e-9), 1.0), 0.0)

    def least_replicas(self, passes_s: Floats, spare_s: Floats) -> Floats:
        """The fewest replicas with which stages' passes of a phase (rows) keep within steady parts (columns)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(passes_s[:, None] > 0, spare_s / passes_s[:, None], np.inf)
            rounds = 1 + np.floor(each * (1 + 1e-12))
            return np.where(spare_s < 0, np.inf, np.ceil(self.minibatches / np.maximum(rounds, 1) - 1e-12))

    def stage_passes_s(self, stage: StageTerms) -> tuple[Floats, ...]:
        """For each phase, the passes of one minibatch of stages, on the fastest device."""
        forward, work = stage.forward_s / self.terms.fastest, stage.work_s / self.terms.fastest
        return (work,) if self.phases == 1 else (forward, work - forward)

    def start(self) -> Floats:
        """The times of the state behind which there is no stage."""
        times = np.zeros((1, self.width))
        times[0, 1] = self.steady_from_s
        return times

    def crossing_s(self, cut: int | Ints, bandwidth: Floats | float) -> tuple[Floats, ...]:
        """For each phase, the seconds for which one minibatch keeps one link of a boundary busy."""
        cuts = self.terms.cuts
        ways = np.asarray(cuts.sent[cut] / bandwidth), np.asarray(cuts.returned[cut] / bandwidth)
        return ways if self.phases == 2 else (np.maximum(*ways),)

    def steady_parts(self, placed: Placed) -> list[Floats]:
        """For each phase, what a stage and the boundary behind it need of the steady part."""
        forward, work = placed.stage.forward_s[placed.row], placed.stage.work_s[placed.row]
        passes = (work,) if self.phases == 1 else (forward, work - forward)
        crossing = self.crossing_s(placed.stage.ends[placed.row], placed.bandwidth)
        return [
            np.maximum(
                formulas.flush_steady(time / placed.speed, self.minibatches, placed.replicas),
                formulas.flush_steady(way, self.minibatches, placed.links),
            )
            for time, way in zip(passes, crossing, strict=True)
        ]

    def in_front(self, before: Floats, placed: Placed, limited_s: Floats | float = 0.0) -> Floats:
        """The times of states (rows) once stages are put in front; `limited_s` is what depths need of the steady part.

        See `formulas.flush_batch`.
        """
        cuts, row, ends = self.terms.cuts, placed.row, placed.stage.ends[placed.row]
        added = placed.stage.work_s[row] / placed.speed + placed.stage.exchange_s[row]
        added = added + (cuts.sent[ends] + cuts.returned[ends]) / placed.bandwidth + 2 * placed.latency_s
        steady = self.steady_parts(placed)
        steady[0] = np.maximum(steady[0], limited_s)
        backward = (placed.stage.work_s[row] - placed.stage.forward_s[row]) / placed.speed
        exposed = formulas.flush_exposed(placed.allreduce_s, backward, self.work_s[placed.stage.targets[row]])
        bounds = np.stack([*steady, exposed], axis=1)
        return np.concatenate([before[:, :1] + added[:, None], np.maximum(before[:, 1:], bounds)], axis=1)

    def reaches(self, targets: Ints, times: Floats, workers: Ints) -> Flags:
        """Whether states may become a batch within the limit, with so many workers for the layers in front."""
        bounds = times[:, 1:].copy()
        for phase, least in enumerate(self._steady_in_front(targets, workers)):
            bounds[:, phase] = np.maximum(bounds[:, phase], least)
        in_time = times[:, 0] + self.work_s[targets] + bounds.sum(axis=1) <= self.budget_s
        return np.asarray(in_time & (bounds[:, 0] <= self.steady_to_s))

    def spare_s(self, targets: Ints, times: Floats) -> Floats:
        """The most seconds that the steady part may take in batches that states may become."""
        left: Floats = self.budget_s - times[:, 0] - self.work_s[targets] - times[:, -1]
        return np.minimum(left, self.steady_to_s) * (1 + SLACK)

    def _steady_in_front(self, targets: Ints, workers: Ints) -> list[Floats]:
        """For each phase, lower bounds on the steady part of the layers inside cuts, on so many workers.

        It is `workers_in_front`, solved for S.
        """
        room = np.maximum(workers, 1)
        return [np.maximum(0.0, (self.minibatches / room - 1) * passes[targets]) for passes in self.passes_s]

    def total_s(self, times: Floats) -> Floats:
        """Seconds from one update to the next."""
        return np.asarray(times.sum(axis=1) + self.terms.problem.copies_allreduce_s)

    # -- depths --

    def limited_s(self, depth: Floats, replicas: Counts, behind: Floats, transfer_s: Floats) -> Floats:
        """What depths need of the steady part; 0 where a replica has no more minibatches (`depth_limited_pace`)."""
        slack = (depth - 1 + formulas.ROUNDING) * replicas - behind
        with np.errstate(divide="ignore", invalid="ignore"):
            steady = np.where(slack > 0, 2 * transfer_s * (self.minibatches - 1) / slack, np.inf)
        return np.where(depth >= formulas.rounds(self.minibatches, replicas), 0.0, steady)

    def depth(
        self, behind: Floats, transfer_s: Floats, steady_s: Floats | float, replicas: Floats | Ints | int
    ) -> Floats:
        """The depths that a steady part needs: never more than the minibatches of a replica."""
        # Without a transfer there is no delay, even if the pace is 0.
        delay = 2 * transfer_s * (self.minibatches - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.where(delay > 0, delay / steady_s, 0.0)
        most = np.asarray(formulas.rounds(self.minibatches, replicas), dtype=np.float64)
        return np.asarray(np.minimum(most, 1 + np.ceil((behind + away) / replicas - formulas.ROUNDING)))

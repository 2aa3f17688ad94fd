"""The terms of the cost model for stages, as arrays over stages that end at one cut, or at one cut each.

Only the numbers of replicas that are fast enough depend on the step time that is searched for. Memory is that of one
worker, by the formulas of `cost.formulas`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipeplan.cost import formulas
from pipeplan.cost.stage_table import CutStages
from pipeplan.plan import schedules
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.replicas import ReplicaIntervals, allowed_replicas

_ARRAYS = (
    "executor_s",
    "work_s",
    "forward_s",
    "update_s",
    "passes_s",
    "parameters",
    "kept_bytes",
    "version_bytes",
    "each_bytes",
    "growing_bytes",
    "_unreplicated_bytes",
    "_alone_bytes",
    "_shared_bytes",
    "_deepest_alone",
    "_deepest_replicated",
)
"""The cached properties of `StageTerms` that have one entry for each stage."""


@dataclass(frozen=True, eq=False)
class StageTerms(CutStages):
    """The stages from several cuts `begin` to one cut `end`, or to one cut each, as arrays over the stages."""

    terms: CostTerms = field(kw_only=True)
    begin: Ints
    recompute: bool = False
    intervals: dict[float, ReplicaIntervals] = field(default_factory=dict)
    """Cache of `allowed`, by threshold."""

    @staticmethod
    def of(terms: CostTerms, end: int | Ints, begin: Ints, *, recompute: bool = False) -> StageTerms:
        """The stages from each cut `begin` to `end`, a single cut or one for each stage."""
        return StageTerms(terms.problem, terms.cuts, begin, end, recompute, terms.shared, terms=terms)

    def __len__(self) -> int:
        return len(self.begin)

    def take(self, rows: Ints) -> StageTerms:
        """The selected stages."""
        intervals = {within: one.take(rows) for within, one in self.intervals.items()}
        end = self.end if isinstance(self.end, int) else self.end[rows]
        taken = replace(self, begin=self.begin[rows], end=end, intervals=intervals)
        # The selected stages keep the terms that have been computed for all stages.
        known = {name: self.__dict__[name] for name in _ARRAYS if name in self.__dict__}
        taken.__dict__.update({name: one[rows] if np.ndim(one) else one for name, one in known.items()})
        return taken

    @cached_property
    def ends(self) -> Ints:
        """The cut behind every stage."""
        return np.broadcast_to(np.asarray(self.end), self.begin.shape)

    @cached_property
    def lasts(self) -> Flags:
        """Whether every stage is the last one."""
        return np.broadcast_to(self.is_last, self.begin.shape)

    def allowed(self, within: float) -> ReplicaIntervals:
        """The numbers of replicas that are fast enough, by level and stage."""
        if within not in self.intervals:
            links, training = self.terms.links, float(self.terms.training)
            self.intervals[within] = allowed_replicas(
                np.broadcast_to(self.work_s / self.terms.speed, (self.terms.layout.top + 1, len(self))),
                self.parameters * training,
                links.allreduce_bandwidth[:, None],
                links.allreduce_latency[:, None] * training,
                within,
                overlap=self.problem.options.overlap,
                accumulate=self.terms.accumulate,
            )
        return self.intervals[within]

    def wait(self, target: Ints, replicas: Floats, level: Ints, threshold: float) -> Floats:
        """Minibatches that pass while replicas wait for their group's all-reduce (`formulas.group_wait`)."""
        terms = self.terms
        if terms.accumulate is not None:
            return np.zeros(len(replicas))
        if terms.problem.copies > 1:
            return np.asarray(formulas.group_wait(0.0, threshold, replicas, terms.problem.copies))
        return np.asarray(formulas.group_wait(self.allreduce(target, replicas, level), threshold, replicas))

    def allreduce(self, target: Ints, replicas: Floats, level: Ints) -> Floats:
        """Seconds of one all-reduce of some of the stages, each on workers that span a level."""
        members = self.terms.members(replicas)
        return np.asarray(formulas.ring_allreduce_time(members, self.parameters[target], *self.terms.ring_of(level)))

    def max_depth_of(self, target: Ints, replicas: Floats) -> Floats:
        """The most minibatches in flight that fit in memory, for the stages `target` with `replicas` replicas each."""
        input_stage = self.terms.first
        if input_stage is None and not self.problem.divided_ratio:
            several, alone = self.deepest(replicated=True), self.deepest(replicated=False)
            return np.where(replicas > 1, several[target], alone[target])
        return self._within_capacity(self.fixed_bytes(replicas, target), self.growing_bytes[target])

    def replicas_for_versions(self, target: Ints, replicas: Floats, cover: Floats) -> Floats:
        """Lower bound on the replicas that fit in memory under vertical sync, if `replicas` do not; 1 if no input stage
        is assumed.

        `cover` is c, the minibatches that the depth must cover in addition to one for each replica. The gcd in
        `schedules.vertical_versions` is at most r_1. So a stage keeps at least 1 + ⌈a / r⌉ versions, with a = (delay -
        1) · r_1, and has 1 + ⌈c / r⌉ minibatches in flight. The bytes of both add up. If they are too large, one of the
        two numbers must fall.
        """
        first = self.terms.first
        if first is None:
            return np.ones(len(target))
        fixed = self._least_fixed(replicated=True)[target]
        growing, version = self.growing_bytes[target], formulas.version_memory(self.parameters[target], 1)
        room = self.problem.capacity * (1 + SLACK) - fixed - growing
        older = (first.delay - 1) * first.replicas
        behind = np.where(self.lasts[target], 0.0, cover)
        deeper, versions = np.ceil(behind / replicas - formulas.ROUNDING), np.ceil(older / replicas)
        surely = np.maximum(behind - formulas.ROUNDING * self.terms.most_replicas, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            together = np.ceil((version * older + growing * surely) / room - formulas.ROUNDING)
            fewer = np.where(deeper > 1, np.ceil(behind / (deeper - 1 + formulas.ROUNDING)), np.inf)
            fewer = np.minimum(fewer, np.where(versions > 1, np.ceil(older / (versions - 1)), np.inf))
        crowded = growing * deeper + version * versions > room
        return np.where(room > 0, np.maximum(together, np.where(crowded, fewer, 1.0)), np.inf)

    def deepest(self, *, replicated: bool) -> Floats:
        """The most minibatches in flight that fit in memory; below 1 if not even one fits.

        Under vertical sync, or if replicas divide the optimiser's state, this is an upper bound.
        """
        return self._deepest_replicated if replicated else self._deepest_alone

    @cached_property
    def _deepest_replicated(self) -> Floats:
        return self._deepest(replicated=True)

    @cached_property
    def _deepest_alone(self) -> Floats:
        return self._deepest(replicated=False)

    def _deepest(self, *, replicated: bool) -> Floats:
        return self._within_capacity(self._least_fixed(replicated=replicated), self.growing_bytes)

    def _least_fixed(self, *, replicated: bool) -> Floats:
        """Lower bound on `fixed_bytes`: other workers hold as much of the optimiser's state as possible."""
        replicas = self.terms.most_replicas * self.problem.copies
        divided = formulas.divided_state(self.parameters, replicas, self.problem.divided_ratio)
        return np.asarray((self._shared_bytes if replicated else self._alone_bytes) - divided)

    def _within_capacity(self, fixed: Floats, growing: Floats) -> Floats:
        capacity = self.problem.capacity
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.floor((capacity - fixed) / growing * (1 + 1e-12))
        return np.where(fixed > capacity, 0.0, np.where(growing == 0, np.inf, most))

    def fixed_bytes(self, replicas: Floats | Ints, pick: Any = ...) -> Floats:
        """Bytes of one worker that do not depend on the depth, with `replicas` replicas in one copy.

        `pick` indexes the stages so that they broadcast with the replicas.
        """
        parameters, first = self.parameters[pick], self.terms.first
        fixed = np.where(replicas > 1, self._shared_bytes[pick], self._alone_bytes[pick])
        if self.problem.divided_ratio:
            fixed = fixed - formulas.divided_state(
                parameters, replicas * self.problem.copies, self.problem.divided_ratio
            )
        if first is not None:
            versions = schedules.vertical_versions(first.delay, first.replicas, replicas.astype(np.intp))
            # One version is already included.
            fixed = fixed + formulas.version_memory(parameters, versions - 1)
        return np.asarray(fixed)

    @cached_property
    def growing_bytes(self) -> Floats:
        """Bytes of one worker for every minibatch in flight."""
        own = self.version_bytes * (self.terms.constant_versions == 0) * self.terms.training
        return np.asarray(self.each_bytes + own)

    @cached_property
    def _alone_bytes(self) -> Floats:
        """`fixed_bytes` of stages without replicas, with the whole optimiser's state."""
        if self.terms.training and self.problem.copies > 1:
            return self._shared_bytes
        return self._unreplicated_bytes

    @cached_property
    def _unreplicated_bytes(self) -> Floats:
        versions = self.version_bytes * self.terms.constant_versions * self.terms.training
        return np.asarray(self.kept_bytes + self.workspace + versions)

    @cached_property
    def _shared_bytes(self) -> Floats:
        """`fixed_bytes` of replicated stages: adds all-reduce buckets, and a weight version if an update lags."""
        late = ~(self.lasts & (self.begin == 0))
        added = formulas.replica_memory(self.parameters, 2, late * self.terms.stashes)
        return np.asarray(self._unreplicated_bytes + added * self.terms.training)

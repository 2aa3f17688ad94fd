"""The terms of the cost model for stages, as arrays over the stages that end at one cut, or each at a cut of its own.

Times do not depend on the step time that is searched for, except for the numbers of replicas that are fast enough.
Memory is that of one worker, by the formulas of `cost.formulas`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan import schedules
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.replicas import ReplicaIntervals, allowed_replicas, may_suffice

_ARRAYS = ("parameters", "_replication", "_deepest_alone", "_deepest_replicated")
"""The cached properties of `StageTerms` that have one entry for each stage."""


@dataclass(frozen=True)
class StageTerms:
    """The stages from several cuts I to one cut J, or each to a cut of its own, as arrays over the stages."""

    terms: CostTerms
    cut: int | Ints
    """The cut J."""
    targets: Ints
    """The cuts I."""
    is_last: bool | Flags
    """Whether J is the full cut."""
    work_s: Floats
    """Compute of one minibatch, in seconds on a device of speed 1."""
    recompute: bool
    overlap: float
    intervals: dict[float, ReplicaIntervals] = field(default_factory=dict)
    """Cache of `allowed`, by threshold."""

    @staticmethod
    def of(terms: CostTerms, cut: int | Ints, targets: Ints, *, recompute: bool = False) -> StageTerms:
        """The stages from each of `targets` to `cut`, a single cut or one for each target."""
        cuts, problem = terms.cuts, terms.problem
        is_last = cut == len(cuts.ideals) - 1
        work = cuts.work_s[cut] - cuts.work_s[targets]
        if recompute:
            work = work + (cuts.forward_s[cut] - cuts.forward_s[targets])
        if problem.cluster.executor:
            work = work + terms.executor_s(cut, targets)
        return StageTerms(terms, cut, targets, is_last, work, recompute, problem.options.overlap)

    def take(self, rows: Ints) -> StageTerms:
        """The selected stages."""
        intervals = {within: one.take(rows) for within, one in self.intervals.items()}
        taken = replace(self, targets=self.targets[rows], work_s=self.work_s[rows], intervals=intervals)
        if not isinstance(self.cut, int):
            taken = replace(taken, cut=self.ends[rows], is_last=self.lasts[rows])
        # The selected stages keep the terms that have been computed for all stages.
        known = self.__dict__
        taken.__dict__.update({name: known[name][rows] for name in _ARRAYS if name in known})
        if "_memory" in known:
            fixed, growing = known["_memory"]
            taken.__dict__["_memory"] = fixed[rows], growing[rows]
        return taken

    @cached_property
    def ends(self) -> Ints:
        """The cut J of every stage."""
        return np.broadcast_to(np.asarray(self.cut), self.targets.shape)

    @cached_property
    def lasts(self) -> Flags:
        """Whether J is the full cut, for every stage."""
        return np.broadcast_to(np.asarray(self.is_last), self.targets.shape)

    def _difference(self, totals: Floats) -> Floats:
        difference: Floats = totals[self.cut] - totals[self.targets]
        return difference

    @cached_property
    def forward_s(self) -> Floats:
        """The forward pass of one minibatch, in seconds on a device of speed 1, with its share of the executor's."""
        forward, passes = self._difference(self.terms.cuts.forward_s), self.terms.problem.passes
        if not self.terms.problem.cluster.executor:
            return forward
        return forward + self.terms.executor_s(self.cut, self.targets) / passes

    @cached_property
    def update_s(self) -> Floats:
        """The optimiser's step, per minibatch, in seconds on a device of speed 1."""
        return self._difference(self.terms.cuts.update_s)

    @cached_property
    def parameters(self) -> Floats:
        """Bytes of parameters, copies of shared weights included."""
        own, shared = self._difference(self.terms.cuts.parameters), self.terms.shared
        return own if shared is None else own + shared.copied(self.targets, self.ends)

    @cached_property
    def exchange_s(self) -> Floats:
        """Seconds per update that the stages are charged for exchanging the gradients of shared weights."""
        shared = self.terms.shared
        return np.zeros(len(self.targets)) if shared is None else shared.exchanged_s(self.targets, self.ends)

    def allowed(self, within: float) -> ReplicaIntervals:
        """The numbers of replicas that are fast enough, by level and stage."""
        if within not in self.intervals:
            work_s, size, bandwidth, latency_s = self._needs
            work_s = np.broadcast_to(work_s, (self.terms.layout.top + 1, len(work_s)))
            self.intervals[within] = allowed_replicas(
                work_s,
                size,
                bandwidth,
                latency_s,
                within,
                overlap=self.overlap,
                accumulate=self.terms.accumulate,
            )
        return self.intervals[within]

    def may_suffice(self, within: float, most: Floats | Ints) -> Flags:
        """Whether up to so many replicas, by level and stage, may be fast enough (`replicas.may_suffice`)."""
        return may_suffice(*self._needs, within, most, overlap=self.overlap, accumulate=self.terms.accumulate)

    @property
    def _needs(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Compute of a minibatch and bytes of gradients, by stage; bandwidth and latency of all-reduces, by level."""
        terms, links = self.terms, self.terms.links
        training = float(terms.training)
        rates = links.allreduce_bandwidth[:, None], links.allreduce_latency[:, None] * training
        return self.work_s / terms.speed, self.parameters * training, *rates

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
        """The most minibatches in flight that fit in memory, for some of the stages with so many replicas."""
        input_stage = self.terms.first
        if input_stage is None and not self.divided_ratio:
            several, alone = self.deepest(replicated=True), self.deepest(replicated=False)
            return np.where(replicas > 1, several[target], alone[target])
        (single, growing), (shared, _) = self.memory(replicated=False), self.memory(replicated=True)
        fixed = np.where(replicas > 1, shared[target], single[target])
        fixed = fixed - self.divided_bytes(self.parameters[target], replicas)
        if input_stage is not None:
            versions = schedules.vertical_versions(input_stage.delay, input_stage.replicas, replicas.astype(np.intp))
            # One version is already included.
            fixed = fixed + formulas.version_memory(self.parameters[target], versions - 1)
        return self._within_capacity(fixed, growing[target])

    def replicas_for_versions(self, target: Ints, replicas: Floats, cover: Floats) -> Floats:
        """The fewest replicas, or fewer, that have room under vertical sync, where so many have not; 1 where no input
        stage is assumed.

        `cover` is what the depth must cover beyond one minibatch for each replica, c. As the gcd in
        `schedules.vertical_versions` is at most r_1, a stage keeps at least ⌈a / r⌉ versions more than one, with a =
        (delay - 1) · r_1, and it has ⌈c / r⌉ minibatches in flight more than one. Their bytes add up, and where these
        numbers are too large already, one of the two must fall.
        """
        first = self.terms.first
        if first is None:
            return np.ones(len(target))
        fixed, growing = self.memory(replicated=True)
        fixed = (fixed - self.divided_bytes(self.parameters, self.terms.most_replicas))[target]
        growing, version = growing[target], formulas.version_memory(self.parameters[target], 1)
        room = self.terms.problem.capacity * (1 + SLACK) - fixed - growing
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

    @property
    def divided_ratio(self) -> float:
        """`Problem.divided_ratio`."""
        return self.terms.problem.divided_ratio

    def divided_bytes(self, parameters: Floats, replicas: Floats | Ints | int) -> Floats:
        """Bytes of the optimiser's state that workers of stages with so many replicas in a copy do not hold."""
        return np.asarray(formulas.divided_state(parameters, replicas * self.terms.problem.copies, self.divided_ratio))

    def deepest(self, *, replicated: bool) -> Floats:
        """The most minibatches in flight that fit in memory; below 1 where not even one does.

        With vertical sync, and where replicas divide the optimiser's state, this is an upper bound.
        """
        return self._deepest_replicated if replicated else self._deepest_alone

    @cached_property
    def _deepest_replicated(self) -> Floats:
        return self._deepest(replicated=True)

    @cached_property
    def _deepest_alone(self) -> Floats:
        return self._deepest(replicated=False)

    def _deepest(self, *, replicated: bool) -> Floats:
        fixed, growing = self.memory(replicated=replicated)
        return self._within_capacity(fixed - self.divided_bytes(self.parameters, self.terms.most_replicas), growing)

    def _within_capacity(self, fixed: Floats, growing: Floats) -> Floats:
        capacity = self.terms.problem.capacity
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.floor((capacity - fixed) / growing * (1 + 1e-12))
        return np.where(fixed > capacity, 0.0, np.where(growing == 0, np.inf, most))

    def memory(self, *, replicated: bool) -> tuple[Floats, Floats]:
        """Bytes of one worker that do not depend on the depth, with the whole of the optimiser's state, and bytes for
        every minibatch in flight."""
        fixed, growing = self._memory
        if self.terms.training and (replicated or self.terms.problem.copies > 1):
            fixed = fixed + self._replication
        return fixed, growing

    @cached_property
    def _memory(self) -> tuple[Floats, Floats]:
        """`memory` of a stage without replicas."""
        terms, cuts = self.terms, self.terms.cuts
        around = cuts.sent + cuts.returned
        around = around[self.cut] + around[self.targets]
        ratio, copies = terms.problem.state_ratio, terms.problem.options.copies_per_version
        buffers, saved = self._difference(cuts.buffers), self._difference(cuts.saved)
        fixed = np.asarray(formulas.fixed_memory(self.parameters, buffers, around, ratio, terms.training))
        if not terms.training:
            return fixed, np.zeros(len(fixed))
        received, sent = cuts.sent[self.targets], cuts.sent[self.cut]
        once = formulas.recompute_memory(saved, sent, self.recompute)
        versions = formulas.version_memory(self.parameters, terms.constant_versions, copies)
        each = formulas.memory_per_depth(
            self.parameters, saved, received, sent, stashes=terms.stashes, recompute=self.recompute
        )
        return fixed + once + versions + cuts.workspaces.between(self.cut, self.targets), np.asarray(each)

    @cached_property
    def _replication(self) -> Floats:
        """Bytes that replication adds: all-reduce buckets, and a weight version where an update is late."""
        late = ~(self.lasts & (self.targets == 0))
        return np.asarray(formulas.replica_memory(self.parameters, 2, late * self.terms.stashes))

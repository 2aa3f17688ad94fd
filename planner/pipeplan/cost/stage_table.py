"""Work, bytes and memory of stages before workers are assigned to them.

A `StageTable` describes many stages as arrays, or one stage as numbers. The class computes the figures of stages from
the figures of layers. Subclasses define the layers of a stage, and the bytes that cross its boundaries:

    CutStages                    the stages between two cuts: both solvers and the grids (`Cuts` or `CutTable`)
    LayersAlone                  layers without boundaries: lower bounds for every stage that holds these layers
    stage_times.PlanStage        one stage of a plan, from its list of layers: the evaluator
    update_bound.GroupStages     the stages between two groups of cuts: lower bounds

Times are seconds for one minibatch on a device of speed 1, sizes are bytes of one worker. The caller adds the terms
that depend on workers (speeds, links, replicas) with `pipeplan.cost.formulas`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.plan.schedules import TRAITS
from pipeplan.problem.between_cuts import SharedInCuts, Workspaces
from pipeplan.problem.problem import Problem
from pipeplan.problem.units import Unit

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Flags = NDArray[np.bool_]

SUMS: dict[str, Callable[[Unit], float]] = {
    "work_s": lambda unit: unit.forward_s + unit.backward_s,
    "forward_s": lambda unit: unit.forward_s,
    "update_s": lambda unit: unit.update_s,
    "parameters": lambda unit: unit.parameter_bytes,
    "buffers": lambda unit: unit.buffer_bytes,
    "saved": lambda unit: unit.saved_bytes,
}
"""Functions that give the figures of a unit, by the figures' names in tables. Each figure of a stage is the sum over
its units."""


class StageTable:
    """Figures of stages. This class has no boundaries and no workspaces; subclasses add them."""

    problem: Problem
    recompute: Any = False
    """Whether the stages recompute their forward pass."""
    is_first: Any = True
    """Whether a stage holds the first layers."""
    is_last: Any = True
    """Whether a stage holds the last layers."""
    received: Any = 0.0
    """Bytes that one minibatch brings from the previous stage."""
    sent: Any = 0.0
    """Bytes that one minibatch takes to the next stage."""
    around: Any = 0.0
    """Bytes of one minibatch that cross both boundaries of a stage, in both directions."""
    copied: Any = 0.0
    """Bytes of copies of shared weights that a stage holds in addition to the parameters of its layers."""
    workspace: Any = 0.0
    """Largest workspace of any layer of the stage, in bytes, because layers run one after another; 0 in inference."""
    exchange_s: Any = 0.0
    """Seconds per update that a stage is charged for exchanging the gradients of shared weights."""

    def inside(self, name: str) -> Any:
        """The sum of a figure (`SUMS`) over the layers of each stage."""
        raise NotImplementedError

    @property
    def state_ratio(self) -> float:
        """Bytes of the optimiser's state per byte of parameters."""
        return self.problem.state_ratio

    @property
    def copied_share(self) -> float:
        """Number of copies of its weights that a stage before the last makes for each minibatch."""
        return self.problem.copied_share

    @property
    def splits(self) -> bool:
        """Whether gradients of weights have a separate pass, so that only forward passes delay later stages."""
        return TRAITS[self.problem.options.schedule].splits

    # -- time --

    @cached_property
    def executor_s(self) -> Any:
        """The executor's own work, in seconds per minibatch."""
        problem = self.problem
        if not problem.executor_costs:
            return 0.0
        boundaries = np.logical_not(self.is_first).astype(int) + np.logical_not(self.is_last)
        copied = np.where(self.is_last, 0.0, self.inside("parameters") * self.copied_share)
        steps = problem.options.update_share
        return formulas.executor_time(problem.executor_costs, problem.passes, boundaries, self.around, copied, steps)

    @cached_property
    def work_s(self) -> Any:
        """Both passes, including recomputation, the optimiser's step and the executor's work."""
        again = self.inside("forward_s") * self.recompute if np.any(self.recompute) else 0.0
        return self.inside("work_s") + again + self.executor_s

    @cached_property
    def forward_s(self) -> Any:
        """The forward pass, including its share of the executor's work."""
        return self.inside("forward_s") + self.executor_s / self.problem.passes

    @cached_property
    def update_s(self) -> Any:
        """The part of `work_s` that is the optimiser's step."""
        return self.inside("update_s")

    # -- under a flush --

    @cached_property
    def passes_s(self) -> Any:
        """Both passes without the optimiser's step."""
        return self.work_s - self.update_s

    @property
    def ahead_s(self) -> Any:
        """The passes of one minibatch by which a stage delays the stages behind it (`flush.ahead_s`)."""
        return self.forward_s if self.splits else self.passes_s

    @property
    def tail_s(self) -> Any:
        """Upper bound on the last minibatch's gradients of weights, which fill the time of draining
        (`flush.tail_s`)."""
        return (self.passes_s - self.forward_s) / 2 if self.splits else 0.0 * self.passes_s

    def waited_s(self, allreduce_s: Any, speed: Any) -> Any:
        """Lower bound on the seconds from a stage's last backward pass to its next forward pass (`flush.exposed_s`)."""
        problem = self.problem
        exposed = formulas.flush_exposed(allreduce_s, (self.passes_s - self.forward_s) / speed, problem.hidden_share)
        return exposed + 2 * self.exchange_s + self.update_s / speed / problem.options.update_share

    # -- memory --

    @cached_property
    def parameters(self) -> Any:
        """Bytes of parameters, including copies of shared weights."""
        return self.inside("parameters") + self.copied

    @cached_property
    def kept_bytes(self) -> Any:
        """Memory in bytes without workspace, weight versions, activations in flight and `replica_bytes`."""
        training = self.problem.training
        fixed = formulas.fixed_memory(self.parameters, self.inside("buffers"), self.around, self.state_ratio, training)
        if not training or not np.any(self.recompute):
            return fixed
        return fixed + formulas.recompute_memory(self.inside("saved"), self.sent, self.recompute)

    @cached_property
    def version_bytes(self) -> Any:
        """Memory of one weight version, in bytes."""
        return formulas.version_memory(self.parameters, 1, self.problem.options.copies_per_version)

    @cached_property
    def each_bytes(self) -> Any:
        """Bytes of activations of each minibatch in flight; 0 in inference."""
        if not self.problem.training:
            return 0.0 * self.parameters
        return formulas.memory_per_depth(self.inside("saved"), self.received, self.sent, recompute=self.recompute)

    def replica_bytes(self, replicas: Any) -> Any:
        """Bytes that replication adds to the memory of each worker in training; negative where replicas divide the
        optimiser's state.

        `replicas` counts the replicas in all copies of the pipeline."""
        divided = formulas.divided_state(self.parameters, replicas, self.problem.divided_ratio)
        return formulas.replica_memory(self.parameters, replicas) - divided


class CutTotals(Protocol):
    """Totals over the layers inside every cut of a model and the bytes that cross the cut, as arrays.

    The names of the totals are those of `SUMS`."""

    @property
    def sent(self) -> Floats:
        """Bytes of one minibatch that cross each cut forward."""

    @property
    def returned(self) -> Floats:
        """Bytes of one minibatch's gradients that cross each cut backward."""

    @property
    def workspaces(self) -> Workspaces:
        """The largest workspace between any two cuts."""


@dataclass(frozen=True, eq=False)
class CutStages(StageTable):
    """The stages from each cut `begin` to the cut `end`. The two arrays broadcast."""

    problem: Problem
    cuts: CutTotals
    begin: int | Ints
    end: int | Ints
    recompute: bool | Flags = False
    shared: SharedInCuts | None = None
    """The weights that units share (`shared_in_cuts`); None if no weights are shared."""

    def inside(self, name: str) -> Floats:
        totals: Floats = getattr(self.cuts, name)
        return np.asarray(totals[self.end] - totals[self.begin])

    @cached_property
    def is_first(self) -> Flags:
        return np.equal(self.begin, 0)

    @cached_property
    def is_last(self) -> Flags:
        return np.equal(self.end, len(self.cuts.sent) - 1)

    @cached_property
    def received(self) -> Floats:
        return self.cuts.sent[self.begin]

    @cached_property
    def sent(self) -> Floats:
        return self.cuts.sent[self.end]

    @cached_property
    def around(self) -> Floats:
        crossing = self.cuts.sent + self.cuts.returned
        return np.asarray(crossing[self.end] + crossing[self.begin])

    @cached_property
    def copied(self) -> Any:
        return 0.0 if self.shared is None else self.shared.copied(*np.broadcast_arrays(self.begin, self.end))

    @cached_property
    def exchange_s(self) -> Any:
        return 0.0 if self.shared is None else self.shared.exchanged_s(*np.broadcast_arrays(self.begin, self.end))

    @cached_property
    def workspace(self) -> Floats:
        return self.cuts.workspaces.between(self.end, np.asarray(self.begin))


@dataclass(frozen=True, eq=False)
class LayersAlone(StageTable):
    """Layers as a stage without boundaries and workspace: its figures are lower bounds for every stage with these
    layers."""

    problem: Problem
    sums: Any
    """The figures by the names of `SUMS`: a `CutTotals` (all layers before each cut), or the result of
    `unit_figures`."""
    ratio: float
    """The value of `state_ratio`."""
    recompute: bool = False

    def inside(self, name: str) -> Floats:
        return np.asarray(getattr(self.sums, name))

    @property
    def executor_s(self) -> float:  # the executor works on whole stages
        return 0.0

    @property
    def state_ratio(self) -> float:
        return self.ratio


def unit_figures(units: Sequence[Unit]) -> SimpleNamespace:
    """The figures of units as arrays, by the names of `SUMS`."""
    return SimpleNamespace(**{name: np.array([of(unit) for unit in units], dtype=float) for name, of in SUMS.items()})


def exchange_times(problem: Problem) -> tuple[float, ...]:
    """Seconds that a stage is charged for exchanging the gradients of each shared weight."""
    if not problem.shared:
        return ()
    cluster = replace(problem.whole or problem.cluster, exchange_rings=1.0)  # all stages sum these gradients in full
    rate = Links.of(cluster).allreduce_among(range(cluster.workers))
    return tuple(float(formulas.shared_weight_time(one.bytes, *rate, cluster.workers)) for one in problem.shared)


def shared_in_cuts(problem: Problem, ideals: Sequence[int]) -> SharedInCuts | None:
    """The copies and exchanges of shared weights for stages between cuts; None if no weights are shared.

    `ideals` are the cuts, as bit sets of units."""
    return SharedInCuts.of(problem.shared, ideals, exchange_times(problem)) if problem.shared else None

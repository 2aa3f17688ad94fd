"""Constraints (8) to (12) of the integer program: in-flight depth and memory; see `ilp` for the notation.

Sizes are in units of the device's memory. Left out altogether where no stage can exceed it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pulp

from pipeplan import cost
from pipeplan.profile import Layer

if TYPE_CHECKING:
    from pipeplan.solvers.ilp_model import Model, Placement, Term


def add(model: Model) -> None:
    """Add the memory constraints to a model, where they can bind."""
    if not model.problem.training:
        _Weights(model).add({run: [1] for run in model.placements})
        return
    lag = _largest_lag(model)
    depths = {run: _depths(model, run, lag) for run in model.placements}
    weights = _Weights(model)
    if weights.can_bind(max(depth for options in depths.values() for depth in options)):
        chosen = weights.add(depths)
        _in_flight(model, chosen, _lags(model, lag), lag)


def _largest_lag(model: Model) -> int:
    """The largest g that a transfer can need: 2 · (size / bandwidth + latency) / T with size / bandwidth ≤ T."""
    latency = float(model.links.sendrecv_latency.max())
    work = sum(model.work(layer) for layer in model.layers)
    slowest_pace = work / model.workers
    if latency == 0:
        return 2
    return 2 + (math.ceil(2 * latency / slowest_pace) if slowest_pace > 0 else 1000)


def _depths(model: Model, run: Placement, lag: int) -> list[int]:
    """Depths that a stage can need: each stage behind adds at most twice its replicas and a lag to those in flight."""
    behind = model.workers - 1 - run.last
    return list(range(1, 2 + math.ceil((behind * (2 + lag) + lag) / run.replicas) if behind else 2))


class _Weights:
    """Constraint (12) and the choice of a depth, (8)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.capacity = model.problem.capacity
        ratio, training = model.problem.profile.optimizer_state_ratio, model.problem.training
        self.fixed = [self._fixed(layer, ratio, training) for layer in model.layers]
        self.growing = [self._growing(layer) for layer in model.layers]
        self.buffers = [sum(sizes) / self.capacity for sizes in zip(*model.directions(), strict=True)]

    def _fixed(self, layer: Layer, ratio: float, training: bool) -> float:
        size = cost.fixed_memory(layer.parameter_bytes, layer.buffer_bytes, 0.0, ratio, training)
        return float(size) / self.capacity

    def _growing(self, layer: Layer) -> float:
        saved = layer.saved_bytes if self.model.problem.training else 0
        return float(cost.memory_per_depth(layer.parameter_bytes, saved)) / self.capacity

    def can_bind(self, depth: int) -> bool:
        """Whether the whole model at this depth, with all tensors in buffers, is too much for one device."""
        needed: float = sum(self.fixed) + depth * sum(self.growing) + 2 * sum(self.buffers)
        return needed > 1

    def add(self, depths: dict[Placement, list[int]]) -> dict[tuple[Placement, int], pulp.LpVariable]:
        """δ[π,d], tied to y[π], and the memory of every placement at every depth."""
        model = self.model
        chosen = {}
        for run, options in depths.items():
            # A depth at which not even the smallest layer fits need not exist.
            kept = [d for d in options if any(self.fixed[i] + d * self.growing[i] <= 1 for i, _ in model.by_run[run])]
            for depth in kept:
                chosen[run, depth] = model.binary(f"d_{run.start}_{run.replicas}_{depth}")
                self._limit(run, depth, chosen[run, depth])
            model.equal([*((chosen[run, depth], 1.0) for depth in kept), (model.used[run], -1.0)], 0.0)
        return chosen

    def _limit(self, run: Placement, depth: int, chosen: pulp.LpVariable) -> None:
        model = self.model
        size = [fixed + depth * growing for fixed, growing in zip(self.fixed, self.growing, strict=True)]
        terms = [(variable, size[index]) for index, variable in model.by_run[run]]
        for worker in (run.start - 1, run.last):
            if 0 <= worker < model.workers - 1:
                terms += [(model.crossing[k, worker], share) for k, share in enumerate(self.buffers) if share]
        excess = sum(size[index] for index, _ in model.by_run[run]) + 2 * sum(self.buffers) - 1
        if excess > 0:
            model.at_most([*terms, (chosen, excess)], 1 + excess)
        # No layer on its own may be too large, whatever else is relaxed.
        for index, variable in model.by_run[run]:
            if size[index] > 1:
                model.at_most([(variable, 1.0), (chosen, 1.0)], 1.0)


def _lags(model: Model, most: int) -> dict[tuple[int, int], pulp.LpVariable]:
    """γ[q,g], one where a stage ends at q (8), large enough for the transfer over q and back (11)."""
    tensors = model.problem.profile.tensors
    lags = {}
    for worker in range(model.workers - 1):
        for lag in range(most + 1):
            lags[worker, lag] = model.binary(f"g_{worker}_{lag}")
        mine = [(lags[worker, lag], 1.0) for lag in range(most + 1)]
        model.equal([*mine, *((variable, -1.0) for variable, _ in model.ending(worker))], 0.0)
        for level in range(1, len(model.problem.cluster.levels) + 1):
            factor = 2 / (model.links.sendrecv_bandwidth[level] * model.unit_s)
            latency = 2 * float(model.links.sendrecv_latency[level]) / model.unit_s
            for sizes in model.directions():
                terms: list[Term] = [
                    (model.crossing[k, worker], sizes[k] * factor) for k in range(len(tensors)) if sizes[k]
                ]
                slack = sum(sizes) * factor + latency
                for lag in range(most + 1):
                    # terms + latency ≤ g · T, released unless both the level and the lag are chosen.
                    released = [(model.level[worker, level], slack), (lags[worker, lag], slack)]
                    model.at_most([*terms, (model.pace, -(lag + cost.ROUNDING)), *released], 2 * slack - latency)
    return lags


def _in_flight(
    model: Model,
    chosen: dict[tuple[Placement, int], pulp.LpVariable],
    lags: dict[tuple[int, int], pulp.LpVariable],
    most_lag: int,
) -> None:
    """K[p], and the depth that it asks for: (9) and (10)."""
    most = model.workers * (2 + most_lag)
    waiting = [pulp.LpVariable(f"K_{worker}", 0, most) for worker in range(model.workers)]
    for worker in range(model.workers):
        here = [(v, float(run.replicas * depth)) for (run, depth), v in chosen.items() if run.start == worker]
        model.at_most([*here, (waiting[worker], -1.0)], 0.0)
        if worker + 1 < model.workers:
            covering = [(v, -float(most)) for run, v in model.used.items() if run.start <= worker <= run.last]
            model.at_most([(waiting[worker + 1], 1.0), (waiting[worker], -1.0), *covering], 0.0)
    for (run, depth), variable in chosen.items():
        if run.last + 1 == model.workers:
            continue
        need: list[Term] = [(waiting[run.last + 1], 1.0)]
        need += [(lags[run.last, lag], float(lag)) for lag in range(1, most_lag + 1)]
        have = (depth - 1) * run.replicas
        slack = float(most + most_lag - have)
        if slack > 0:
            model.at_most([*need, (variable, slack)], have + slack)

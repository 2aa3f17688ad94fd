"""Constraints (8) to (11) of the integer program: in-flight depth and memory; see `ilp` for the notation.

Sizes are in units of the device's memory. Left out altogether where no stage can exceed it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    periods = _periods(model)
    depths = {run: _depths(model, run, periods) for run in model.placements}
    weights = _Weights(model)
    if weights.can_bind(max(depth for options in depths.values() for depth in options)):
        _in_flight(model, weights.add(depths), periods)


def _periods(model: Model) -> int:
    """The most periods that a transfer and back can take: each way size / bandwidth ≤ T, and the latency."""
    latency = float(model.links.sendrecv_latency.max())
    pace = sum(model.work(layer) for layer in model.layers) / model.workers
    return 2 + (min(math.ceil(2 * latency / pace), 1000) if latency > 0 else 0)


def _depths(model: Model, run: Placement, slack: int) -> list[int]:
    """Depths that a stage can need: each stage behind adds at most four times its replicas and a slack to K."""
    behind = model.workers - 1 - run.last
    return list(range(1, 3 + math.ceil((behind * (4 + slack) + slack) / run.replicas) if behind else 2))


class _Weights:
    """Constraint (11) and the choice of a depth, (8)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.capacity = model.problem.capacity
        ratio, training = model.problem.profile.optimizer_state_ratio, model.problem.training
        self.single = _single_stage(model)
        self.fixed = [self._fixed(layer, ratio, training) for layer in model.layers]
        self.growing = [self._growing(layer) for layer in model.layers]
        self.parameters = [layer.parameter_bytes / self.capacity for layer in model.layers]
        self.buffers = [sum(sizes) / self.capacity for sizes in zip(*model.directions(), strict=True)]
        self.held = [size / self.capacity if training else 0.0 for size in model.directions()[0]]

    def _fixed(self, layer: Layer, ratio: float, training: bool) -> float:
        size = cost.fixed_memory(layer.parameter_bytes, layer.buffer_bytes, 0.0, ratio, training)
        return float(size) / self.capacity

    def _growing(self, layer: Layer) -> float:
        if not self.model.problem.training:
            return 0.0
        return float(cost.memory_per_depth(layer.parameter_bytes, layer.saved_bytes, 0, 0)) / self.capacity

    def can_bind(self, depth: int) -> bool:
        """Whether the whole model at this depth, with all tensors at both boundaries, is too much for one device."""
        tensors = 2 * sum(self.buffers) + 2 * depth * sum(self.held)
        needed: float = sum(self.fixed) + 2 * sum(self.parameters) + depth * sum(self.growing) + tensors
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
            self._least(run)
        return chosen

    def _least(self, run: Placement) -> None:
        """Memory at depth 1, and at 2 where something follows: implied by the depth, but without a big M."""
        model = self.model
        least = [(v, self.fixed[i] + self.growing[i]) for i, v in model.by_run[run]]
        model.at_most([*least, (model.used[run], -1.0)], 0.0)
        if not model.problem.training or run.last + 1 == model.workers:
            return
        levels = range(1, len(model.problem.cluster.levels) + 1)
        most = sum(self.growing[index] for index, _ in model.by_run[run])
        twice = [(v, self.fixed[i] + 2 * self.growing[i]) for i, v in model.by_run[run]]
        follows = [(model.level[run.last, level], most) for level in levels]
        model.at_most([*twice, (model.used[run], -1.0), *follows], most)

    def _limit(self, run: Placement, depth: int, chosen: pulp.LpVariable) -> None:
        model, training = self.model, self.model.problem.training
        replicated = training and run.replicas * model.problem.copies > 1
        # Buckets, and a version for the late update, which a single stage does not have.
        extra = 2.0 if replicated else 0.0
        size = [
            fixed + depth * growing + extra * parameters
            for fixed, growing, parameters in zip(self.fixed, self.growing, self.parameters, strict=True)
        ]
        terms = [(variable, size[index]) for index, variable in model.by_run[run]]
        for worker in (run.start - 1, run.last):
            if 0 <= worker < model.workers - 1:
                shares = [buffer + depth * held for buffer, held in zip(self.buffers, self.held, strict=True)]
                terms += [(model.crossing[k, worker], share) for k, share in enumerate(shares) if share]
        if replicated:
            terms.append((self.single, -sum(self.parameters)))
        tensors = 2 * (sum(self.buffers) + depth * sum(self.held))
        excess = sum(size[index] for index, _ in model.by_run[run]) + tensors - 1
        if excess > 0:
            model.at_most([*terms, (chosen, excess)], 1 + excess)
        # No layer on its own may be too large, whatever else is relaxed.
        for index, variable in model.by_run[run]:
            if size[index] - (self.parameters[index] if replicated else 0.0) > 1:
                model.at_most([(variable, 1.0), (chosen, 1.0)], 1.0)


def _single_stage(model: Model) -> pulp.LpVariable:
    """A variable that is 1 only if there is a single stage."""
    single = model.binary("single")
    most = float(model.workers)
    model.at_most([*((used, 1.0) for used in model.used.values()), (single, most - 1)], most)
    return single


def _in_flight(model: Model, chosen: dict[tuple[Placement, int], pulp.LpVariable], periods: int) -> None:
    """K[p] · T, and the depth that it asks for: (9) and (10)."""
    most = float(model.workers * (4 + periods))
    waiting = [pulp.LpVariable(f"K_{worker}", 0, most) for worker in range(model.workers)]
    waits = {run: _wait(model, run) for run in model.placements}
    for (run, depth), variable in chosen.items():
        # r · d · T + wait ≤ K[p] · T, released unless the stage is there at that depth.
        demanded = run.replicas * (depth + 1.0)
        pace = (model.pace, float(run.replicas * depth))
        model.at_most([pace, *waits[run], (waiting[run.start], -1.0), (variable, demanded)], demanded)
    for worker in range(model.workers - 1):
        covering = [(v, -most) for run, v in model.used.items() if run.start <= worker <= run.last]
        model.at_most([(waiting[worker + 1], 1.0), (waiting[worker], -1.0), *covering], 0.0)
    for (run, depth), variable in chosen.items():
        if run.last + 1 == model.workers:
            continue
        have = (model.pace, -float((depth - 1) * run.replicas))
        for level in range(1, len(model.problem.cluster.levels) + 1):
            over = model.level[run.last, level]
            for transfer, latency, longest in _round_trips(model, run.last, level):
                # K[p] · T + wait + transfers ≤ (d - 1) · r · T, released unless stage, depth and level are chosen.
                excess = most + run.replicas + longest
                need = [(waiting[run.last + 1], 1.0), *waits[run], *transfer]
                model.at_most([*need, have, (variable, excess), (over, excess)], 2 * excess - latency)


def _wait(model: Model, run: Placement) -> list[Term]:
    """The terms of a stage's wait for its group, in units of U: max(0, all-reduce - T), or the bound for copies."""
    copies = model.problem.copies
    if copies > 1:
        return [(model.pace, float(cost.group_wait(0.0, 1.0, run.replicas, copies)))]
    if run.replicas == 1:
        return []
    wait = pulp.LpVariable(f"w_{run.start}_{run.replicas}", 0, run.replicas)
    latency = model.synchronisation(run, 0.0)
    terms: list[Term] = [(model.used[run], latency * run.replicas / model.unit_s)]
    for index, variable in model.by_run[run]:
        rate = model.synchronisation(run, model.layers[index].parameter_bytes) - latency
        terms.append((variable, rate * run.replicas / model.unit_s))
    model.at_most([*terms, (model.pace, -1.0), (wait, -1.0)], 0.0)
    return [(wait, 1.0)]


def _round_trips(model: Model, worker: int, level: int) -> Iterator[tuple[list[Term], float, float]]:
    """For each direction: terms and constant of twice the transfer over a boundary, and the most they can be."""
    factor = 2 / (model.links.sendrecv_bandwidth[level] * model.unit_s)
    latency = 2 * float(model.links.sendrecv_latency[level]) / model.unit_s
    for sizes in model.directions():
        terms = [(model.crossing[k, worker], size * factor) for k, size in enumerate(sizes) if size]
        yield terms, latency, sum(sizes) * factor + latency

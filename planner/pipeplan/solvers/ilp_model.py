"""Constraints (1) to (7) of the integer program; see `ilp` for the notation. Memory, (8) to (11), is in `ilp_memory`.

Times are in units of the upper bound U, so that every T lies in [0, 1] and one tolerance serves all instances.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import pulp

from pipeplan import cost
from pipeplan.links import Links
from pipeplan.problem import Problem
from pipeplan.profile import Layer, edges
from pipeplan.solvers import ilp_memory
from pipeplan.solvers.pipeline import Segment

Term = tuple[pulp.LpVariable, float]


@dataclass(frozen=True)
class Placement:
    """A run of `replicas` workers from `start`; `last` is its last worker, `span` the level that holds it."""

    start: int
    replicas: int
    span: int

    @property
    def last(self) -> int:
        return self.start + self.replicas - 1


class Model:
    """The program for one pipeline on one cluster."""

    def __init__(self, problem: Problem, upper_s: float) -> None:
        self.problem = problem
        self.unit_s = upper_s if upper_s > 0 else 1.0
        self.layers = problem.profile.layers
        self.names = [layer.name for layer in self.layers]
        self.links = Links.of(problem.cluster)
        self.workers = problem.cluster.workers
        self.placements = self._placements()
        self.program = pulp.LpProblem("pipeplan", pulp.LpMinimize)
        self.pace = pulp.LpVariable("T", 0, 1)
        self.program.setObjective(pulp.LpAffineExpression([(self.pace, 1.0)]))
        self._reachable = _Closure(problem)
        self.used = {run: self.binary(f"y_{run.start}_{run.replicas}") for run in self.placements}
        self.on = {
            (index, run): self.binary(f"x_{index}_{run.start}_{run.replicas}")
            for index in range(len(self.layers))
            for run in self.placements
            if self._conceivable(index, run)
        }
        self.by_layer: dict[int, list[tuple[Placement, pulp.LpVariable]]] = defaultdict(list)
        self.by_run: dict[Placement, list[tuple[int, pulp.LpVariable]]] = defaultdict(list)
        for (index, run), variable in self.on.items():
            self.by_layer[index].append((run, variable))
            self.by_run[run].append((index, variable))
        self._assign()
        self._order()
        self._time()
        self.crossing = self._cross()
        self.level = self._levels()
        self._boundaries()
        if problem.options.memory:
            ilp_memory.add(self)

    # -- building blocks --

    def binary(self, name: str) -> pulp.LpVariable:
        """A new 0/1 variable."""
        return pulp.LpVariable(name, 0, 1, pulp.LpInteger)

    def at_most(self, terms: Iterable[Term], limit: float) -> None:
        """Add Σ coefficient · variable ≤ limit."""
        self.program += pulp.LpConstraint(pulp.LpAffineExpression(_merged(terms)), pulp.LpConstraintLE, None, limit)

    def equal(self, terms: Iterable[Term], value: float) -> None:
        """Add Σ coefficient · variable = value."""
        self.program += pulp.LpConstraint(pulp.LpAffineExpression(_merged(terms)), pulp.LpConstraintEQ, None, value)

    def finished(self, index: int, worker: int) -> list[Term]:
        """The terms of [layer is on a placement that ends by `worker`]."""
        return [(variable, 1.0) for run, variable in self.by_layer[index] if run.last <= worker]

    def ending(self, worker: int) -> list[Term]:
        """The terms of [a stage ends at `worker`]."""
        return [(variable, 1.0) for run, variable in self.used.items() if run.last == worker]

    def _placements(self) -> list[Placement]:
        cluster, options = self.problem.cluster, self.problem.options
        most = min(options.max_replicas or self.workers, self.workers)
        return [
            Placement(start, count, cluster.level_between(start, start + count - 1))
            for start in range(self.workers)
            for count in range(1, min(most, self.workers - start) + 1)
        ]

    def work(self, layer: Layer) -> float:
        """Seconds of one minibatch on one worker."""
        backward = layer.backward_s if self.problem.training else 0.0
        return (layer.forward_s + backward) / self.problem.cluster.device.speed

    def synchronisation(self, run: Placement, size: float) -> float:
        """Seconds per minibatch to all-reduce `size` bytes on a placement."""
        if not self.problem.training:
            return 0.0
        bandwidth, latency = self.links.allreduce_bandwidth[run.span], self.links.allreduce_latency[run.span]
        return float(cost.synchronisation_time(run.replicas, size, bandwidth, latency))

    def _conceivable(self, index: int, run: Placement) -> bool:
        """Whether the layer can be there at all under U: its own time, and that of all before and behind it."""
        layer, closure = self.layers[index], self._reachable
        limit = self.unit_s * (1 + 1e-9)
        return (
            self.work(layer) / run.replicas <= limit
            and self.synchronisation(run, layer.parameter_bytes) <= limit
            and self.work(layer) + closure.before_s[index] <= limit * (run.last + 1)
            and self.work(layer) + closure.after_s[index] <= limit * (self.workers - run.start)
        )

    # -- (1) and (2) --

    def _assign(self) -> None:
        for index in range(len(self.layers)):
            self.equal([(variable, 1.0) for _, variable in self.by_layer[index]], 1.0)
        for run, used in self.used.items():
            members = self.by_run[run]
            self.at_most([(used, 1.0), *((variable, -1.0) for _, variable in members)], 0.0)
            for _, variable in members:
                self.at_most([(variable, 1.0), (used, -1.0)], 0.0)
        for worker in range(self.workers):
            self.at_most([(used, 1.0) for run, used in self.used.items() if run.start <= worker <= run.last], 1.0)
        if (stages := self.problem.options.stages) is not None:
            self.equal([(used, 1.0) for used in self.used.values()], float(stages))
        for group in self.problem.profile.together:
            tied = [self.names.index(name) for name in group]
            for (first, other), run in itertools.product(itertools.pairwise(tied), self.placements):
                pair = ((self.on.get((first, run)), 1.0), (self.on.get((other, run)), -1.0))
                self.equal([(variable, sign) for variable, sign in pair if variable is not None], 0.0)

    # -- (3) --

    def _order(self) -> None:
        for source, target in self._reachable.edges:
            for worker in range(self.workers - 1):
                started = [(variable, 1.0) for run, variable in self.by_layer[target] if run.start <= worker]
                before = [(variable, -1.0) for run, variable in self.by_layer[source] if run.start <= worker]
                if started:
                    self.at_most([*started, *before], 0.0)

    # -- (4) --

    def _time(self) -> None:
        exposed = 1.0 - self.problem.options.overlap
        for run, used in self.used.items():
            latency = self.synchronisation(run, 0.0)
            for of_compute, of_sync in ((1.0, exposed), (exposed, 1.0)):
                terms: list[Term] = [(used, of_sync * latency / self.unit_s)]
                for index, variable in self.by_run[run]:
                    layer = self.layers[index]
                    compute = self.work(layer) / run.replicas
                    rate = self.synchronisation(run, layer.parameter_bytes) - latency
                    terms.append((variable, (of_compute * compute + of_sync * rate) / self.unit_s))
                self.at_most([*terms, (self.pace, -1.0)], 0.0)
                self.at_most([*terms, (used, -1.0)], 0.0)

    # -- (5) --

    def _cross(self) -> dict[tuple[int, int], pulp.LpVariable]:
        """b[k,q] for every tensor and every worker but the last."""
        position = {name: index for index, name in enumerate(self.names)}
        variables = {}
        for number, tensor in enumerate(self.problem.profile.tensors):
            for worker in range(self.workers - 1):
                variable = variables[number, worker] = pulp.LpVariable(f"b_{number}_{worker}", 0, 1)
                source = self.finished(position[tensor.producer], worker)
                for consumer in tensor.consumers:
                    target = self.finished(position[consumer], worker)
                    self.at_most([*source, *((v, -c) for v, c in target), (variable, -1.0)], 0.0)
        return variables

    # -- (6) --

    def _levels(self) -> dict[tuple[int, int], pulp.LpVariable]:
        """λ[q,n] for every worker but the last and every level."""
        cluster = self.problem.cluster
        count = len(cluster.levels)
        variables = {
            (worker, level): self.binary(f"l_{worker}_{level}")
            for worker in range(self.workers - 1)
            for level in range(1, count + 1)
        }
        for worker in range(self.workers - 1):
            mine = [variables[worker, level] for level in range(1, count + 1)]
            ending = [(variable, -1.0) for variable, _ in self.ending(worker)]
            self.at_most([*((variable, 1.0) for variable in mine), *ending], 0.0)
            for sink in self._reachable.sinks:
                # E[q] - [sink finished by q] ≤ Σ λ: something follows as long as an output is still to come.
                rest = [(variable, -1.0) for variable, _ in self.finished(sink, worker)]
                self.at_most([*self.ending(worker), *rest, *((variable, -1.0) for variable in mine)], 0.0)
            for level in range(1, count):
                size = cluster.span(level)
                first = worker // size * size
                inside = [(variable, 1.0) for variable in mine[:level]]
                here = [(v, -1.0) for run, v in self.used.items() if run.last == worker and run.start >= first]
                following = [
                    (v, -1.0) for run, v in self.used.items() if run.start > worker and run.last < first + size
                ]
                self.at_most([*inside, *here], 0.0)
                self.at_most([*inside, *following], 0.0)
        return variables

    # -- (7) --

    def _boundaries(self) -> None:
        tensors = self.problem.profile.tensors
        for (worker, level), chosen in self.level.items():
            for sizes in self.directions():
                factor = 1 / (self.links.sendrecv_bandwidth[level] * self.unit_s)
                # The crossing can exceed what the link carries in U only where the level is not chosen.
                excess = max(0.0, sum(sizes) * factor - 1.0)
                terms = [(self.crossing[k, worker], sizes[k] * factor) for k in range(len(tensors)) if sizes[k]]
                if terms and excess > 0:
                    self.at_most([*terms, (self.pace, -1.0), (chosen, excess + 1.0)], excess + 1.0)
                elif terms:
                    self.at_most([*terms, (self.pace, -1.0), (chosen, 1.0)], 1.0)

    def directions(self) -> list[list[float]]:
        """Bytes of every tensor forward, and of its gradient backward (training only)."""
        tensors = self.problem.profile.tensors
        forward = [float(tensor.bytes) for tensor in tensors]
        if not self.problem.training:
            return [forward]
        return [forward, [float(tensor.gradient_bytes) for tensor in tensors]]

    # -- reading the answer --

    def objective(self) -> float:
        """Seconds per minibatch of the integer solution, by this program's own coefficients."""
        return _value(self.pace) * self.unit_s

    def segments(self) -> list[Segment]:
        """The stages of the solution, input to output; depths are for the caller to assign."""
        chosen = sorted((run for run, used in self.used.items() if _value(used) > 0.5), key=lambda run: run.start)
        return [
            Segment(
                tuple(self.names[index] for index, variable in self.by_run[run] if _value(variable) > 0.5),
                run.start,
                run.replicas,
                1,
            )
            for run in chosen
        ]


class _Closure:
    """Edges by index, and the work that must come before and after every layer."""

    def __init__(self, problem: Problem) -> None:
        profile = problem.profile
        position = {layer.name: index for index, layer in enumerate(profile.layers)}
        self.edges = [(position[source], position[target]) for source, target in edges(profile.tensors)]
        work = [
            (layer.forward_s + (layer.backward_s if problem.training else 0.0)) / problem.cluster.device.speed
            for layer in profile.layers
        ]
        count = len(work)
        self.sinks = sorted(set(range(count)) - {source for source, _ in self.edges})
        self.before_s = _reachable_work(count, [(target, source) for source, target in self.edges], work)
        self.after_s = _reachable_work(count, self.edges, work)


def _reachable_work(count: int, arrows: list[tuple[int, int]], work: list[float]) -> list[float]:
    following: dict[int, list[int]] = defaultdict(list)
    for source, target in arrows:
        following[source].append(target)
    totals = []
    for node in range(count):
        seen, waiting = {node}, [node]
        while waiting:
            for target in following[waiting.pop()]:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        totals.append(sum(work[other] for other in seen - {node}))
    return totals


def _value(variable: pulp.LpVariable) -> float:
    """The value of a variable of a solved program."""
    value: float | None = variable.varValue
    assert value is not None, "the program has not been solved"
    return value


def _merged(terms: Iterable[Term]) -> dict[pulp.LpVariable, float]:
    merged: dict[pulp.LpVariable, float] = defaultdict(float)
    for variable, coefficient in terms:
        merged[variable] += coefficient
    return merged
